"""Estimates advantages of turns, and spreads them over the turns' tokens.

An episode one of whose rows has no reward gets no advantage and does not count in those of others. TrainingError for an
advantage that is not finite, unless ``run.on_nan=skip``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.algorithms import EpisodeRows, TurnAdvantages, TurnOutcomes, moments, row_sums, whitened
from siirl_dask.context import Context
from siirl_dask.errors import DataError
from siirl_dask.nodes.episodes import EPISODE_COLUMNS
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import packed, ragged, scatter_valid, values
from siirl_dask.nodes.turn_table import TableTurns, episode_rows, scored_episodes, turns_of
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


def _try(*, advantage: Callable[[TurnOutcomes], TurnAdvantages], team: bool = False, whiten: bool = False) -> None:
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    rows = EpisodeRows(row_ids=ids, group_ids=ids, episode_ids=ids, agents=ids, parts=ids)
    start = torch.zeros(1, dtype=torch.int64)
    estimated = advantage(TurnOutcomes(rows=rows, offsets=start, rewards=none, states=ids, lengths=ids, values=none))
    for name, tensor in {"advantages": estimated.advantages, "returns": estimated.returns}.items():
        if tensor.shape != (0,):
            raise ValueError(f"{name} have shape {list(tensor.shape)}: expected [0]")


_NONE = (0.0, 0.0, 0.0)
_ONES = (1.0, 1.0, 1.0)
_UNEVEN = (0.25, 0.0, 0.5)


def _learns_alone(
    *, advantage: Callable[[TurnOutcomes], TurnAdvantages], team: bool = False, whiten: bool = False
) -> bool:
    """Return False for an advantage that compares a prompt's episodes, and not the turns of an episode either.

    Beside no other, an episode without rewards has 0 then, and of any other no turn is worse than another. With
    ``whiten`` the batch's mean is a baseline, where there is anything to whiten.
    """
    prompts = torch.arange(2)
    apart = advantage(_two_episodes(prompts, _NONE, _ONES)).advantages
    if whiten:
        return bool((apart != apart[0]).any())
    together = advantage(_two_episodes(torch.zeros_like(prompts), _NONE, _ONES)).advantages
    if torch.equal(apart, together):
        return True
    if apart[0] != 0:
        return True
    of_turns = advantage(_two_episodes(prompts, _UNEVEN, _UNEVEN)).advantages
    return bool(of_turns.min() < 0 < of_turns.max())


def _two_episodes(group_ids: Tensor, first: Sequence[float], second: Sequence[float]) -> TurnOutcomes:
    """Return two episodes of one agent with the rewards of their turns, of one token each."""
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
    trial=_try,
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
    """Add an advantage and a return for each response token, those of its turn, and the number of the turn.

    The node asks for rows=GROUPED: groups are whole. Without the column ``turns`` each row is one turn. A turn's reward
    is the one in ``turns``, plus the penalties of its tokens (``kl_penalty``). What ``reward`` has beyond the row's
    turns is on the last of them. With ``team`` all agents' rows of an episode carry the reward of the team: it counts
    once, and what it has beyond all turns is on the episode's last one. With ``whiten``, what ``advantage`` returned
    gets mean 0 and variance 1 over all the role's workers, turns or tokens each counting once.

    DataError where ``team`` finds different rewards in an episode, and for spans that do not fit the response.
    """
    comparable = scored_episodes(table)
    scored = table.filter(comparable)
    turns = turns_of(scored)
    outcomes = _outcomes(scored, turns, team)
    estimated = advantage(outcomes)
    advantages = estimated.advantages
    if whiten:
        counted = _counted(outcomes, advantages)
        advantages = whitened(advantages, counted, ctx.all_sum(moments(advantages, counted)))
    for name, numbers in {ADVANTAGES: advantages, RETURNS: estimated.returns}.items():
        flat = _on_tokens(numbers, outcomes, turns)
        table = table.append_column(name, scatter_valid(comparable, ragged(flat, turns.token_offsets, TYPES[name])))
    numbered = ragged(turns.numbers, turns.token_offsets, TYPES[TOKEN_TURNS])
    table = table.append_column(TOKEN_TURNS, scatter_valid(comparable, numbered))
    check_finite(ctx, table, ADVANTAGES, RETURNS)
    return table


def _outcomes(table: pa.Table, turns: TableTurns, team: bool) -> TurnOutcomes:
    """Return what the advantage sees of scored rows."""
    rows, rewards = episode_rows(table), turns.rewards
    within, lengths = turns.in_turns, turns.lengths
    flat = packed(table[VALUES])[0][within] if VALUES in table.column_names else None
    outcomes = TurnOutcomes(
        rows=rows, offsets=turns.offsets, rewards=rewards, states=turns.states, lengths=lengths, values=flat
    )
    given = values(table[REWARD]).double()
    rewards = rewards + (_beyond_team if team else _beyond_rows)(given, outcomes)
    if KL_PENALTY in table.column_names:
        rewards = rewards + row_sums(packed(table[KL_PENALTY])[0].double()[within], outcomes.token_offsets)
    return TurnOutcomes(
        rows=rows, offsets=turns.offsets, rewards=rewards.float(), states=turns.states, lengths=lengths, values=flat
    )


_ROUNDING = 1e-6  # of a reward as float32: less than this is no reward beyond the turns'


def _rest(given: float, own: float) -> float:
    return given - own if not abs(given - own) <= _ROUNDING * max(1.0, abs(given)) else 0.0


def _beyond_rows(given: Tensor, outcomes: TurnOutcomes) -> Tensor:
    """Return what each row's reward has beyond its turns', on its last turn; without any on its part's last. [S]."""
    extra = torch.zeros_like(outcomes.rewards)
    own = row_sums(outcomes.rewards, outcomes.offsets).tolist()
    offsets, rest = outcomes.offsets.tolist(), given.tolist()
    of_part, members = outcomes.parts(), outcomes.rows.members()
    for part, rows in members.items():
        for row in rows:
            turns = range(offsets[row], offsets[row + 1]) or of_part[part]
            if turns:
                extra[turns[-1]] += _rest(rest[row], own[row])
    return extra


def _beyond_team(given: Tensor, outcomes: TurnOutcomes) -> Tensor:
    """Return what the reward of an episode, which all its parts carry, has beyond its turns', on its last. [S]."""
    extra, rewards, rows = torch.zeros_like(outcomes.rewards), given.tolist(), outcomes.rows
    totals: dict[int, list[float]] = {}
    for members in rows.members().values():
        total = sum(rewards[row] for row in members)
        totals.setdefault(int(rows.episode_ids[members[0]]), []).append(total)
    if different := {episode: sorted(found) for episode, found in totals.items() if _rest(max(found), min(found))}:
        episode, found = next(iter(different.items()))
        raise DataError(f"episode {episode} has the rewards {found}: with team=true expected one, that of the team")
    for rounds in outcomes.rounds():
        turns = [turn for taken in rounds for turn in taken]
        if turns:
            episode = int(rows.episode_ids[outcomes.row_of_turn[turns[-1]]])
            extra[turns[-1]] = _rest(totals[episode][0], float(outcomes.rewards[turns].sum()))
    return extra


def _counted(outcomes: TurnOutcomes, numbers: Tensor) -> Tensor:
    """Return which of the numbers whitening counts: those of tokens, or of turns that have some."""
    if numbers.shape == outcomes.lengths.shape:
        return outcomes.lengths > 0
    return torch.ones(len(numbers), dtype=torch.bool)


def _on_tokens(numbers: Tensor, outcomes: TurnOutcomes, turns: TableTurns) -> Tensor:
    """Give each response token the number of its turn, or its own; 0 outside of turns. [S] or [K] -> [N].

    DataError for any other shape.
    """
    tokens = torch.zeros(len(turns.turn_of_token))
    if numbers.shape == outcomes.lengths.shape:
        numbers = numbers.repeat_interleave(outcomes.lengths)
    if numbers.shape != (int(outcomes.lengths.sum()),):
        raise DataError(
            f"the advantage gave {list(numbers.shape)}: expected [{len(outcomes.lengths)}], a number for each turn, or "
            f"[{int(outcomes.lengths.sum())}], one for each token"
        )
    tokens[turns.in_turns] = numbers.float()
    return tokens
