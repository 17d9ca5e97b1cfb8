"""Seconds of a step of the optimizer on one worker, and the bytes that it sends.

AdamW   reads and writes 40 bytes a parameter
Muon    8 bytes fewer, for it has one moment, and five iterations of Newton-Schulz with three
        products each (arXiv:2502.16982): for a matrix [m, n] with m <= n, (4 m m n + 2 m m m)
        FLOPs an iteration, in bfloat16. Workers share the matrices; whole ones go to the others
        afterwards, and of sharded ones rows come together before, and go back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from siirl_dask.estimates.speeds import Speed

_FLOAT32 = 4
# bytes: AdamW reads weights, gradients and moments and writes all but the gradients, which are
# zeroed
_ADAMW = 40
_MOMENT = 8  # bytes, read and written
_ITERATIONS = 5  # of Newton-Schulz, in torch.optim.Muon


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step on one worker."""

    seconds: float
    sent: float
    """Bytes that all workers have of what the step sends, of which each sends its share."""


def optimizer_step(
    learned: int,
    matrices: Sequence[Sequence[int]],
    speed: Speed,
    *,
    shards: int,
    workers: int,
    gathers: bool,
) -> OptimizerStep:
    """Estimate a step on ``learned`` parameters, those that Muon steps included: ``matrices`` are
    their shapes, none with AdamW.

    ``shards`` of ``workers`` divide the parameters; a backend that ``gathers`` them shares the work
    on matrices within these, another one among all workers.
    """
    stepped = sum(map(prod, matrices))
    seconds = (_ADAMW * learned - _MOMENT * stepped) / shards / speed.memory_rate
    sharing = workers
    if gathers:
        sharing = shards
    flops = sum(map(newton_schulz_flops, matrices))
    seconds += flops / sharing / (speed.flops * speed.training)
    sent: float = _FLOAT32 * stepped
    if gathers:
        sent = 2 * sent / shards
    return OptimizerStep(seconds, sent)


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Return the FLOPs of a step of Muon on a matrix [rows, columns], or a stack of these."""
    short = min(shape[-2:])
    long = max(shape[-2:])
    each = 4 * short * short * long + 2 * short**3
    return float(_ITERATIONS * prod(shape[:-2]) * each)
