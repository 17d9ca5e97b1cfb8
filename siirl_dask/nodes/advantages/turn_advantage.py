"""Estimates advantages of turns, and spreads them over the turns' tokens.

An episode one of whose rows has no reward gets no advantage and does not count in those of others.
TrainingError for an advantage that is not finite, unless ``run.on_nan=skip``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.algorithms import (
    EpisodeRows,
    TurnAdvantages,
    TurnOutcomes,
    moments,
    row_sums,
    whitened,
)
from siirl_dask.context import Context
from siirl_dask.errors import DataError
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS
from siirl_dask.nodes.episodes.turn_table import TableTurns, episode_rows, scored_episodes, turns_of
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import packed, ragged, scatter_valid, values
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ADVANTAGES,
    GROUP_ID,
    KL_PENALTY,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    REWARD,
    TOKEN_TURNS,
    TURNS,
    TYPES,
    VALUES,
    fields,
)


def _check_advantage(
    *, advantage: Callable[[TurnOutcomes], TurnAdvantages], team: bool = False, whiten: bool = False
) -> None:
    """Call the advantage with no turns, before the run begins. ValueError for a result of the
    wrong shape.
    """
    empty = torch.zeros(0)
    empty_ids = torch.zeros(0, dtype=torch.int64)
    outcomes = TurnOutcomes(
        rows=EpisodeRows.empty(),
        offsets=torch.zeros(1, dtype=torch.int64),
        rewards=empty,
        states=empty_ids,
        lengths=empty_ids,
        values=empty,
    )
    estimated = advantage(outcomes)
    for name, tensor in {"advantages": estimated.advantages, "returns": estimated.returns}.items():
        if tensor.shape != (0,):
            raise ValueError(f"{name} have shape {list(tensor.shape)}: expected [0]")


_ZERO_REWARDS = (0.0, 0.0, 0.0)
_EQUAL_REWARDS = (1.0, 1.0, 1.0)
_UNEQUAL_REWARDS = (0.25, 0.0, 0.5)


def _learns_alone(
    *, advantage: Callable[[TurnOutcomes], TurnAdvantages], team: bool = False, whiten: bool = False
) -> bool:
    """Return whether a single episode of a prompt can get advantages other than 0.

    False for an advantage that compares the episodes of a prompt, and does not compare the turns of
    an episode either: an episode without rewards that is alone in its group gets 0, and the turns
    of any other one do not get advantages of both signs. With ``whiten`` the batch's mean is a
    baseline, where there is anything to whiten.
    """
    prompts = torch.arange(2)
    apart = advantage(_two_episodes(prompts, _ZERO_REWARDS, _EQUAL_REWARDS)).advantages
    if whiten:
        return bool((apart != apart[0]).any())
    together = advantage(
        _two_episodes(torch.zeros_like(prompts), _ZERO_REWARDS, _EQUAL_REWARDS)
    ).advantages
    if torch.equal(apart, together):
        return True
    if apart[0] != 0:
        return True
    unequal = advantage(_two_episodes(prompts, _UNEQUAL_REWARDS, _UNEQUAL_REWARDS)).advantages
    return bool(unequal.min() < 0 < unequal.max())


def _two_episodes(
    group_ids: Tensor, first: Sequence[float], second: Sequence[float]
) -> TurnOutcomes:
    """Return two episodes of one agent, with the rewards of the turns of each; a turn has one
    token.
    """
    numbers = torch.arange(2)
    rewards = torch.tensor([*first, *second])
    return TurnOutcomes(
        rows=EpisodeRows(
            row_ids=numbers,
            group_ids=group_ids,
            episode_ids=numbers,
            agents=torch.zeros_like(numbers),
            parts=numbers,
        ),
        offsets=torch.tensor([0, len(first), len(rewards)]),
        rewards=rewards,
        states=torch.zeros(len(rewards), dtype=torch.int64),
        lengths=torch.ones(len(rewards), dtype=torch.int64),
        values=torch.full((len(rewards),), 0.5),
    )


@columns(
    reads=[REWARD, GROUP_ID, RESPONSE_IDS],
    optional=[TURNS, RESPONSE_MASK, KL_PENALTY, VALUES, *EPISODE_COLUMNS],
    writes=fields(ADVANTAGES, RETURNS, TOKEN_TURNS),
    trial=_check_advantage,
    learns_alone=_learns_alone,
)
def estimate_turn_advantages(
    ctx: Context,
    table: pa.Table,
    *,
    advantage: Callable[[TurnOutcomes], TurnAdvantages],
    team: bool = False,
    whiten: bool = False,
) -> pa.Table:
    """Add an advantage and a return for each response token, those of its turn, and the number of
    the turn.

    The node needs complete groups: rows=GROUPED. Without the column ``turns`` each row is one turn.
    A turn's reward is the one in ``turns``, plus the penalties of its tokens (``kl_penalty``). The
    difference between ``reward`` and the sum of the row's turns is added to the last of them. With
    ``team`` all agents' rows of an episode have the reward of the team: it counts once, and its
    difference to the sum of all turns is added to the episode's last one. With ``whiten``, the
    result of ``advantage`` gets mean 0 and variance 1 over all the role's workers, turns or tokens
    each counting once.

    DataError where ``team`` finds different rewards in an episode, and for spans that do not fit
    the response.
    """
    comparable = scored_episodes(table)
    scored = table.filter(comparable)
    turns = turns_of(scored)
    outcomes = _outcomes(scored, turns, team)
    estimated = advantage(outcomes)
    advantages = estimated.advantages
    if whiten:
        mask = _whitening_mask(outcomes, advantages)
        advantages = whitened(advantages, mask, ctx.all_sum(moments(advantages, mask)))
    for name, numbers in {ADVANTAGES: advantages, RETURNS: estimated.returns}.items():
        flat = _on_tokens(numbers, outcomes, turns)
        table = table.append_column(
            name, scatter_valid(comparable, ragged(flat, turns.token_offsets, TYPES[name]))
        )
    turn_numbers = ragged(turns.numbers, turns.token_offsets, TYPES[TOKEN_TURNS])
    table = table.append_column(TOKEN_TURNS, scatter_valid(comparable, turn_numbers))
    check_finite(ctx, table, ADVANTAGES, RETURNS)
    return table


def _outcomes(table: pa.Table, turns: TableTurns, team: bool) -> TurnOutcomes:
    """Return what the advantage sees of scored rows."""
    token_values = None
    if VALUES in table.column_names:
        token_values = packed(table[VALUES])[0][turns.in_turns]
    turn_outcomes = TurnOutcomes(
        rows=episode_rows(table),
        offsets=turns.offsets,
        rewards=turns.rewards,
        states=turns.states,
        lengths=turns.lengths,
        values=token_values,
    )
    row_rewards = values(table[REWARD]).double()
    if team:
        rewards = turns.rewards + _beyond_team(row_rewards, turn_outcomes)
    else:
        rewards = turns.rewards + _beyond_rows(row_rewards, turn_outcomes)
    if KL_PENALTY in table.column_names:
        penalties = packed(table[KL_PENALTY])[0][turns.in_turns]
        rewards = rewards + row_sums(penalties.double(), turn_outcomes.token_offsets)
    return replace(turn_outcomes, rewards=rewards.float())


# relative to a reward as float32: a smaller difference is no reward beyond the turns'
_ROUNDING = 1e-6


def _beyond(reward: float, turns: float) -> float:
    """Return what a reward has beyond the sum of its turns' rewards; 0 for a difference of
    rounding.
    """
    difference = reward - turns
    if abs(difference) <= _ROUNDING * max(1.0, abs(reward)):
        return 0.0
    return difference


def _beyond_rows(row_rewards: Tensor, outcomes: TurnOutcomes) -> Tensor:
    """Return what each row's reward has beyond its turns', on its last turn; for a row without
    turns, on the last turn of its part. [R] -> [S].
    """
    extra = torch.zeros_like(outcomes.rewards)
    rewards = row_rewards.tolist()
    turn_sums = row_sums(outcomes.rewards, outcomes.offsets).tolist()
    offsets = outcomes.offsets.tolist()
    turns_of_part = outcomes.parts()
    for part, rows in outcomes.rows.members().items():
        for row in rows:
            turns: Sequence[int] = range(offsets[row], offsets[row + 1])
            if not turns:
                turns = turns_of_part[part]
            if turns:
                extra[turns[-1]] += _beyond(rewards[row], turn_sums[row])
    return extra


def _beyond_team(row_rewards: Tensor, outcomes: TurnOutcomes) -> Tensor:
    """Return what an episode's reward, which all its parts have, is beyond its turns', on its last
    turn. [R] -> [S].

    DataError for an episode whose parts have different rewards.
    """
    extra = torch.zeros_like(outcomes.rewards)
    rewards = row_rewards.tolist()
    rows = outcomes.rows
    part_rewards: dict[int, list[float]] = {}
    for part_rows in rows.members().values():
        episode = int(rows.episode_ids[part_rows[0]])
        part_rewards.setdefault(episode, []).append(sum(rewards[row] for row in part_rows))
    for episode, totals in part_rewards.items():
        if _beyond(max(totals), min(totals)):
            raise DataError(
                f"episode {episode} has the rewards {sorted(totals)}: with team=true expected one, "
                "that of the team"
            )
    for rounds in outcomes.rounds():
        turns = [turn for round_turns in rounds for turn in round_turns]
        if turns:
            last = turns[-1]
            episode = int(rows.episode_ids[outcomes.row_of_turn[last]])
            extra[last] = _beyond(part_rewards[episode][0], float(outcomes.rewards[turns].sum()))
    return extra


def _whitening_mask(outcomes: TurnOutcomes, numbers: Tensor) -> Tensor:
    """Return which of the numbers count in whitening: all of tokens, of turns those that have
    tokens.
    """
    if numbers.shape == outcomes.lengths.shape:
        return outcomes.lengths > 0
    return torch.ones(len(numbers), dtype=torch.bool)


def _on_tokens(numbers: Tensor, outcomes: TurnOutcomes, turns: TableTurns) -> Tensor:
    """Give each response token the number of its turn, or its own; 0 outside of turns. [S] or [K]
    -> [N].

    DataError for any other shape.
    """
    tokens = torch.zeros(len(turns.turn_of_token))
    if numbers.shape == outcomes.lengths.shape:
        numbers = numbers.repeat_interleave(outcomes.lengths)
    if numbers.shape != (int(outcomes.lengths.sum()),):
        raise DataError(
            f"the advantage gave {list(numbers.shape)}: expected [{len(outcomes.lengths)}], a "
            f"number for each turn, or [{int(outcomes.lengths.sum())}], one for each token"
        )
    tokens[turns.in_turns] = numbers.float()
    return tokens
