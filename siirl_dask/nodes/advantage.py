"""Estimates advantages of rows or of tokens, and draws mini-batches.

A row without a reward (its reward function failed, and ``rewards.max_failures`` allowed it) gets no advantage and does
not count in those of others. TrainingError for an advantage that is not finite, unless ``run.on_nan=skip``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from siirl_dask.algorithms import Outcomes, TokenAdvantages, TokenOutcomes, moments, row_sums, whitened
from siirl_dask.context import Context
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import packed, ragged, response_mask, scatter_valid, valid_rows, values
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    GREEDY,
    GREEDY_REWARD,
    GROUP_ID,
    KL_PENALTY,
    MINIBATCH,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    REWARD,
    ROW_ID,
    TYPES,
    VALUES,
    fields,
)

_DRAW = -1  # stands for a row id in the seed of a draw that belongs to the step as a whole


def _try_rows(*, advantage: Callable[[Outcomes], Tensor]) -> None:
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    _check_count(advantage(Outcomes(rewards=none, group_ids=ids, lengths=ids, baselines=none)), "advantages")


def _try_tokens(*, advantage: Callable[[TokenOutcomes], TokenAdvantages], whiten: bool = True) -> None:
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    outcomes = TokenOutcomes(rewards=none, group_ids=ids, offsets=torch.zeros(1).long(), mask=none.bool(), values=none)
    estimated = advantage(outcomes)
    _check_count(estimated.advantages, "advantages")
    _check_count(estimated.returns, "returns")


def _check_count(values: Tensor, name: str) -> None:
    if values.shape != (0,):
        raise ValueError(f"{name} have shape {list(values.shape)}: expected [0]")


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, GREEDY_REWARD],
    writes=fields(ADVANTAGE),
    trial=_try_rows,
)
def estimate_advantage(ctx: Context, table: pa.Table, *, advantage: Callable[[Outcomes], Tensor]) -> pa.Table:
    """Add one advantage a row, from ``advantage(Outcomes) -> [R]``. The node asks for rows=GROUPED: groups are whole.

    The sum of a row's token rewards (``kl_penalty``) is added to its reward.
    """
    comparable = valid_rows(table, REWARD, GREEDY_REWARD)
    scored = table.filter(comparable)
    mask, offsets = response_mask(scored)
    rewards = values(scored[REWARD])
    if KL_PENALTY in scored.column_names:
        rewards = rewards + row_sums(packed(scored[KL_PENALTY])[0] * mask, offsets)
    outcomes = Outcomes(
        rewards=rewards,
        group_ids=values(scored[GROUP_ID]),
        lengths=row_sums(mask.long(), offsets),
        baselines=values(scored[GREEDY_REWARD]) if GREEDY_REWARD in scored.column_names else None,
        all_sum=ctx.all_sum,
    )
    estimated = pa.array(advantage(outcomes).numpy(), TYPES[ADVANTAGE])
    table = table.append_column(ADVANTAGE, scatter_valid(comparable, estimated))
    check_finite(ctx, table, ADVANTAGE)
    return table


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, VALUES],
    writes=fields(ADVANTAGES, RETURNS),
    trial=_try_tokens,
)
def estimate_token_advantages(
    ctx: Context, table: pa.Table, *, advantage: Callable[[TokenOutcomes], TokenAdvantages], whiten: bool = True
) -> pa.Table:
    """Add an advantage and a return for each response token. The row's reward falls on its last token in the mask.

    With ``whiten``, advantages get mean 0 and variance 1 over the tokens of all the role's workers.
    """
    comparable = valid_rows(table, REWARD)
    scored = table.filter(comparable)
    mask, offsets = response_mask(scored)
    rewards = _on_last_token(values(scored[REWARD]), mask, offsets)
    if KL_PENALTY in scored.column_names:
        rewards = rewards + packed(scored[KL_PENALTY])[0] * mask
    outcomes = TokenOutcomes(
        rewards=rewards,
        group_ids=values(scored[GROUP_ID]),
        offsets=offsets,
        mask=mask,
        values=packed(scored[VALUES])[0] if VALUES in scored.column_names else None,
    )
    estimated = advantage(outcomes)
    advantages = estimated.advantages
    if whiten:
        advantages = whitened(advantages, mask, ctx.all_sum(moments(advantages, mask)))
    for name, flat in {ADVANTAGES: advantages, RETURNS: estimated.returns}.items():
        table = table.append_column(name, scatter_valid(comparable, ragged(flat, offsets, TYPES[name])))
    check_finite(ctx, table, ADVANTAGES, RETURNS)
    return table


@columns(reads=[GREEDY, REWARD, GROUP_ID], writes=fields(GREEDY_REWARD), new_rows=True)
def take_greedy_baselines(ctx: Context, table: pa.Table) -> pa.Table:
    """Give each sample its prompt's greedy reward as a baseline, and drop the greedy rows (ReMax, arXiv:2310.10505).

    The node asks for rows=GROUPED; the responses come from ``generate_with_greedy``. ValueError for a group without a
    greedy response.
    """
    greedy = table.filter(table[GREEDY])
    baseline = dict(zip(greedy[GROUP_ID].to_pylist(), greedy[REWARD].to_pylist(), strict=True))
    ctx.log("reward/greedy", [reward for reward in baseline.values() if reward is not None])
    sampled = table.filter(pc.invert(table[GREEDY]))
    if missing := sorted(set(sampled[GROUP_ID].to_pylist()) - baseline.keys()):
        raise ValueError(f"groups {missing[:5]} have no greedy response: generate with generate_with_greedy")
    baselines = pa.array([baseline[group] for group in sampled[GROUP_ID].to_pylist()], TYPES[GREEDY_REWARD])
    return sampled.append_column(GREEDY_REWARD, baselines)


@columns(reads=[GROUP_ID], writes=fields(MINIBATCH))
def draw_minibatches(
    ctx: Context, table: pa.Table, *, minibatches: int, batch_size: int, n: int = 1, split_groups: bool = False
) -> pa.Table:
    """Assign each row to a mini-batch: shuffle the step's prompts and cut them into equal parts.

    Samples go with their prompt; a group of an earlier step goes where the group at its place would. With
    ``split_groups`` each of a prompt's ``n`` samples is drawn by itself. The draw depends on the step's seed alone, so
    all workers agree without a message.
    """
    ids, count = (table[ROW_ID], batch_size * n) if split_groups else (table[GROUP_ID], batch_size)
    order = np.random.default_rng(ctx.seed(_DRAW)).permutation(count)
    drawn = order[ids.to_numpy() % count] * minibatches // count
    return table.append_column(MINIBATCH, pa.array(drawn, TYPES[MINIBATCH]))


def _on_last_token(rewards: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Put each row's reward on its last token in the mask; a row without one gets zeros. [R] -> [K]."""
    rows = torch.arange(len(rewards)).repeat_interleave(offsets.diff())
    places = torch.where(mask, torch.arange(len(mask)), -1)
    last = torch.full((len(rewards),), -1).scatter_reduce(0, rows, places, "amax")
    there = last >= 0
    return torch.zeros(len(mask), dtype=rewards.dtype).index_put_((last[there],), rewards[there])
