"""Advantages and returns of single tokens, from the rewards of rows."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.algorithms import TokenAdvantages, TokenOutcomes, moments, whitened
from siirl_dask.context import Context
from siirl_dask.nodes.advantages.trials import check_empty
from siirl_dask.nodes.episodes.sequences import (
    EPISODE_COLUMNS,
    comparison_groups,
    complete_sequences,
    sequences_of,
)
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import packed, ragged, response_mask, scatter_valid, values
from siirl_dask.planner import ContractChanges, columns
from siirl_dask.schema import (
    ADVANTAGES,
    COLLISION_PROBS,
    GROUP_ID,
    KL_PENALTY,
    OLD_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    REWARD,
    TYPES,
    VALUES,
    fields,
)


def _check_token_advantages(
    *,
    advantage: Callable[[TokenOutcomes], TokenAdvantages],
    whiten: bool = True,
    probabilities: bool = False,
) -> None:
    """Call the advantage with no rows, before the run begins. ValueError for a result of the
    wrong shape.
    """
    empty = torch.zeros(0)
    outcomes = TokenOutcomes(
        rewards=empty,
        group_ids=empty.long(),
        offsets=torch.zeros(1).long(),
        mask=empty.bool(),
        values=empty,
        logprobs=empty if probabilities else None,
        collision=empty if probabilities else None,
    )
    estimated = advantage(outcomes)
    check_empty(estimated.advantages, "advantages")
    check_empty(estimated.returns, "returns")


def _tokens_learn_alone(
    *,
    advantage: Callable[[TokenOutcomes], TokenAdvantages],
    whiten: bool = True,
    probabilities: bool = False,
) -> bool:
    """Return whether a single sample of a prompt, of one token here, can get an advantage other
    than 0, as one can that ``estimate_advantage`` asks for.
    """
    if whiten:  # the batch's mean is a baseline then
        return True
    prompts = torch.arange(2)
    apart = advantage(_two_tokens(prompts)).advantages
    together = advantage(_two_tokens(torch.zeros_like(prompts))).advantages
    if torch.equal(apart, together):
        return True
    return bool(apart[0] != 0)


def _two_tokens(group_ids: Tensor) -> TokenOutcomes:
    return TokenOutcomes(
        rewards=torch.tensor([0.0, 1.0]),
        group_ids=group_ids,
        offsets=torch.arange(3),
        mask=torch.ones(2, dtype=torch.bool),
        values=torch.full((2,), 0.5),
        logprobs=torch.full((2,), 0.5).log(),
        collision=torch.full((2,), 0.5),
    )


def _reads_probabilities(*, probabilities: bool = False, **options: object) -> ContractChanges:
    return ContractChanges(reads=(OLD_LOGPROBS, COLLISION_PROBS) if probabilities else ())


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[RESPONSE_MASK, KL_PENALTY, VALUES, *EPISODE_COLUMNS],
    writes=fields(ADVANTAGES, RETURNS),
    depends_on_options=_reads_probabilities,
    trial=_check_token_advantages,
    learns_alone=_tokens_learn_alone,
)
def estimate_token_advantages(
    ctx: Context,
    table: pa.Table,
    *,
    advantage: Callable[[TokenOutcomes], TokenAdvantages],
    whiten: bool = True,
    probabilities: bool = False,
) -> pa.Table:
    """Add an advantage and a return for each response token. The row's reward is that of its last
    token in the mask.

    The rows of an episode are one row here: a segment's last token is followed by the first one of
    the next segment. With ``whiten``, advantages get mean 0 and variance 1 over the tokens of all
    the role's workers. With ``probabilities`` the advantage also gets log-probs and collision
    probabilities, which ``policy_logprobs`` writes.
    """
    comparable = complete_sequences(table, [REWARD])
    scored = table.filter(comparable)
    sequences = sequences_of(scored)
    scored = sequences.sorted_table(scored)
    mask, row_offsets = response_mask(scored)
    offsets = sequences.token_offsets(row_offsets)
    sequence_starts = sequences.starts_of_rows(offsets)
    rewards = _rewards_on_last_tokens(values(scored[REWARD]), mask, row_offsets, sequence_starts)
    if KL_PENALTY in scored.column_names:
        token_penalties, _ = packed(scored[KL_PENALTY])
        rewards = rewards + token_penalties * mask
    token_values = None
    if VALUES in scored.column_names:
        token_values, _ = packed(scored[VALUES])
    logprobs = None
    collision = None
    if probabilities:
        logprobs, _ = packed(scored[OLD_LOGPROBS])
        collision, _ = packed(scored[COLLISION_PROBS])
    outcomes = TokenOutcomes(
        rewards=rewards,
        group_ids=comparison_groups(scored)[sequences.ends],
        offsets=offsets,
        mask=mask,
        values=token_values,
        logprobs=logprobs,
        collision=collision,
    )
    estimated = advantage(outcomes)
    advantages = estimated.advantages
    if whiten:
        moments_of_all = ctx.all_sum(moments(advantages, mask))
        advantages = whitened(advantages, mask, moments_of_all)
    for name, flat in {ADVANTAGES: advantages, RETURNS: estimated.returns}.items():
        column = sequences.unsorted_column(ragged(flat, row_offsets, TYPES[name]))
        table = table.append_column(name, scatter_valid(comparable, column))
    check_finite(ctx, table, ADVANTAGES, RETURNS)
    return table


def _rewards_on_last_tokens(
    rewards: Tensor,
    mask: Tensor,
    offsets: Tensor,
    sequence_starts: Tensor,
) -> Tensor:
    """Put each row's reward on its last token in the mask. [R] -> [K].

    ``sequence_starts``, [R], is the index of the first token of the row's sequence. The reward of a
    row without tokens in the mask is put on the last such token before it in the sequence; where
    there is none either, on no token.
    """
    row_of_token = torch.arange(len(rewards)).repeat_interleave(offsets.diff())
    index_in_mask = torch.where(mask, torch.arange(len(mask)), -1)
    no_token = torch.full((len(rewards),), -1)
    last_of_row = no_token.scatter_reduce(0, row_of_token, index_in_mask, "amax")
    last_so_far = last_of_row.cummax(0).values
    has_token = last_so_far >= sequence_starts
    on_tokens = torch.zeros(len(mask), dtype=rewards.dtype)
    return on_tokens.index_put_((last_so_far[has_token],), rewards[has_token], accumulate=True)
