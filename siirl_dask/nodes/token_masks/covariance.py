"""Chooses the tokens that clip-cov and kl-cov treat specially (arXiv:2505.22617), over all
workers.
"""

from __future__ import annotations

from math import inf

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from siirl_dask.algorithms import covariances
from siirl_dask.context import Context, Reduce
from siirl_dask.errors import PeerError
from siirl_dask.nodes.packed_table import (
    advantages_of,
    pack_rows,
    ragged,
    response_mask,
    scatter_valid,
    valid_rows,
)
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    COVARIANT,
    MINIBATCH,
    OLD_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    ROW_ID,
    TYPES,
    fields,
)


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS, OLD_LOGPROBS, MINIBATCH],
    one_of=[ADVANTAGE, ADVANTAGES],
    optional=[RESPONSE_MASK],
    writes=fields(COVARIANT),
)
def choose_covariant(
    ctx: Context,
    table: pa.Table,
    *,
    minibatches: int,
    fraction: float = 2e-4,
    low: float | None = None,
    high: float | None = None,
) -> pa.Table:
    """Mark ``fraction`` of each mini-batch's tokens, at least one.

    kl-cov marks the tokens of highest covariance; clip-cov, with bounds (1 and 5 in the paper),
    draws from the tokens between them with the step's seed. Means and choice are over all workers:
    any number of them marks the same tokens. The choice is made once a step, from log-probs before
    the update, as the paper's is in the first mini-batch.
    """
    comparable = valid_rows(table, [advantages_of(table)])
    rows = table.filter(comparable)
    packed = pack_rows(rows)
    mask, offsets = response_mask(rows)
    logprobs = packed.column(rows, OLD_LOGPROBS).double()
    advantages = packed.column(rows, advantages_of(rows)).double()
    minibatch_of = packed.column(rows, MINIBATCH)
    draws = None if low is None and high is None else _draws(ctx, rows, offsets)
    low = -inf if low is None else low
    high = inf if high is None else high
    chosen = torch.zeros(len(mask), dtype=torch.bool)
    for minibatch in range(minibatches):
        tokens = torch.nonzero(mask & (minibatch_of == minibatch)).squeeze(1)
        own_sums = [len(tokens), float(logprobs[tokens].sum()), float(advantages[tokens].sum())]
        count, logprob_sum, advantage_sum = ctx.all_sum(own_sums)
        mean_logprob = logprob_sum / max(1.0, count)
        mean_advantage = advantage_sum / max(1.0, count)
        scores = covariances(logprobs[tokens], advantages[tokens], mean_logprob, mean_advantage)
        if draws is not None:
            tokens = tokens[(scores >= low) & (scores <= high)]
            scores = draws[tokens]
        threshold = _threshold(ctx, scores, max(1, int(fraction * count)))
        chosen[tokens[scores >= threshold]] = True
    ctx.log("policy/covariant_tokens", int(chosen.sum()), Reduce.SUM)
    return table.append_column(
        COVARIANT, scatter_valid(comparable, ragged(chosen, offsets, TYPES[COVARIANT]))
    )


def _draws(ctx: Context, table: pa.Table, offsets: Tensor) -> Tensor:
    """Return a number in [0, 1) for each token, which its row id and its index in the row
    determine. [K].
    """
    drawn = [np.zeros(0)]
    for row_id, length in zip(table[ROW_ID].to_pylist(), offsets.diff().tolist(), strict=True):
        generator = np.random.default_rng(ctx.seed(row_id))
        drawn.append(generator.random(length))
    return torch.from_numpy(np.concatenate(drawn))


def _threshold(ctx: Context, scores: Tensor, count: int) -> float:
    """Return the ``count``-th highest score over all workers; -inf where they have fewer."""
    highest = scores.topk(min(count, len(scores))).values
    messages = ctx.all_gather(highest.numpy().tobytes())
    everyone = np.concatenate([_read_scores(message, count) for message in messages])
    if len(everyone) < count:
        return -inf
    return float(np.partition(everyone, -count)[-count])


def _read_scores(message: bytes, count: int) -> NDArray[np.float64]:
    """Return the scores in a worker's message. PeerError where it is not at most ``count``
    numbers.
    """
    if len(message) % 8 or len(message) > 8 * count:
        raise PeerError(
            f"received {len(message)} bytes: expected at most {count} scores of 8 bytes"
        )
    return np.frombuffer(message, np.float64)
