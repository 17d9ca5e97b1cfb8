"""Chooses the tokens that clip-cov and kl-cov treat apart (arXiv:2505.22617), over the mini-batches of all workers."""

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
from siirl_dask.nodes.packed_table import advantages_of, pack_rows, ragged, response_mask, scatter_valid, valid_rows
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

    kl-cov marks the tokens of highest covariance; clip-cov, with bounds (1 and 5 in the paper), draws from the tokens
    between them with the step's seed. Means and choice are over all workers: any number of them marks the same tokens.
    The choice is made once a step, from log-probs before the update, as the paper's is in the first mini-batch.
    """
    comparable = valid_rows(table, advantages_of(table))
    rows = table.filter(comparable)
    packed = pack_rows(rows)
    mask, offsets = response_mask(rows)
    logprobs, advantages = (packed.column(rows, name).double() for name in (OLD_LOGPROBS, advantages_of(rows)))
    minibatch_of = packed.column(rows, MINIBATCH)
    draws = None if low is None and high is None else _draws(ctx, rows, offsets)
    chosen = torch.zeros(len(mask), dtype=torch.bool)
    for minibatch in range(minibatches):
        places = torch.nonzero(mask & (minibatch_of == minibatch)).squeeze(1)
        count, *sums = ctx.all_sum([len(places), float(logprobs[places].sum()), float(advantages[places].sum())])
        means = [total / max(1.0, count) for total in sums]
        scores = covariances(logprobs[places], advantages[places], *means)
        if draws is not None:
            between = (scores >= (-inf if low is None else low)) & (scores <= (inf if high is None else high))
            places, scores = places[between], draws[places[between]]
        chosen[places[scores >= _threshold(ctx, scores, max(1, int(fraction * count)))]] = True
    ctx.log("policy/covariant_tokens", int(chosen.sum()), Reduce.SUM)
    return table.append_column(COVARIANT, scatter_valid(comparable, ragged(chosen, offsets, TYPES[COVARIANT])))


def _draws(ctx: Context, table: pa.Table, offsets: Tensor) -> Tensor:
    """Return a number in [0, 1) for each token, decided by its row and its place. [K]."""
    seeds = (ctx.seed(row_id) for row_id in table[ROW_ID].to_pylist())
    drawn = [np.random.default_rng(seed).random(n) for seed, n in zip(seeds, offsets.diff().tolist(), strict=True)]
    return torch.from_numpy(np.concatenate([np.zeros(0), *drawn]))


def _threshold(ctx: Context, scores: Tensor, count: int) -> float:
    """Return the ``count``-th highest score over all workers."""
    own = scores.topk(min(count, len(scores))).values
    everyone = np.concatenate([_read_scores(message, count) for message in ctx.all_gather(own.numpy().tobytes())])
    return float(np.partition(everyone, -count)[-count]) if len(everyone) >= count else -inf


def _read_scores(message: bytes, count: int) -> NDArray[np.float64]:
    """Return the scores in a worker's message. PeerError where it is not at most ``count`` numbers."""
    if len(message) % 8 or len(message) > 8 * count:
        raise PeerError(f"received {len(message)} bytes: expected at most {count} scores of 8 bytes")
    return np.frombuffer(message, np.float64)
