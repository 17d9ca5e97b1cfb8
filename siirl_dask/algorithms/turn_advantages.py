"""Advantages of turns: credit for what a single turn did, from rewards of turns.

Shapes as in ``turn_outcomes.py``: S turns of R rows, K tokens in them. Returns are sums from a
part's last turn to its first in float64, rounded to float32 before they are compared; statistics
are those of ``advantages.py``. All of them stay within a group, so the results are the same, bit
for bit, in any order of rows, however parts are cut into segments, and on any number of workers.

Comparing turns has a price: where the policy decides how many turns there are, a baseline of turns
with the same number is a bonus for going on (verl #7244). Functions say which turns they compare.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import fsum

import torch
from torch import Tensor

from siirl_dask.algorithms.comparisons import compare_within
from siirl_dask.algorithms.turn_outcomes import TurnAdvantages, TurnOutcomes

_EPSILON = 1e-6  # as in grpo


def turn_returns(
    outcomes: TurnOutcomes,
    *,
    discount: float = 0.4,
    same_turn: bool = False,
    divide_by_std: bool = True,
    epsilon: float = _EPSILON,
) -> TurnAdvantages:
    """Standardise the returns of turns, ``R_t = sum over k >= t of discount^(k - t) r_k``, over all
    turns of an agent in a group (Kevin, arXiv:2507.11948). [S].

    A turn is credited for its own reward and, less and less, for those that it led to; 0.4 is the
    paper's discount. With ``same_turn`` a turn is compared with those of the same number alone, as
    AT-GRPO does (arXiv:2510.11062), and one that is the only one has 0. Without ``divide_by_std``
    the mean is subtracted and nothing else. Returns are the R_t.
    """
    returns = _discounted(outcomes, discount)
    numbers = _numbers(outcomes)
    keys = []
    for of, number in zip(_who(outcomes), numbers, strict=True):
        keys.append((*of, number if same_turn else 0))
    advantages = compare_within(
        returns,
        keys,
        divide_by_std=divide_by_std,
        epsilon=epsilon,
        lone=not same_turn,
    )
    return TurnAdvantages(advantages=advantages, returns=returns)


def gigpo(
    outcomes: TurnOutcomes,
    *,
    discount: float = 0.95,
    weight: float = 1.0,
    divide_by_std: bool = True,
    epsilon: float = _EPSILON,
) -> TurnAdvantages:
    """Return ``A_E + weight A_S``, where episodes are compared, and turns that were taken in the
    same state (GiGPO, arXiv:2505.10978). [S].

    A_E is GRPO's advantage of the part's summed reward among those of its group and agent. A_S is
    the same of the turns' discounted returns among turns of the group and agent with an equal
    state. A turn without a state, or alone in it, has A_S 0: without any state the result is
    GRPO's. Without ``divide_by_std`` both are centred alone, the paper's ``F_norm = 1``. Returns
    are the discounted ones.
    """
    returns = _discounted(outcomes, discount)
    states = outcomes.states.tolist()
    keys = []
    for turn, (of, state) in enumerate(zip(_who(outcomes), states, strict=True)):
        # a turn without a state is compared with none
        keys.append((*of, state, -1 if state else turn))
    of_states = compare_within(
        returns,
        keys,
        divide_by_std=divide_by_std,
        epsilon=epsilon,
        lone=False,
    )
    of_episodes = _of_parts(outcomes, _sums(outcomes), divide_by_std, epsilon)
    return TurnAdvantages(advantages=of_episodes + weight * of_states, returns=returns)


def mt_grpo(
    outcomes: TurnOutcomes,
    *,
    weight: float = 1.0,
    divide_by_std: bool = True,
    epsilon: float = _EPSILON,
) -> TurnAdvantages:
    """Return ``A_T + weight A_O`` for every turn but a part's last, and ``A_O`` for that (MT-GRPO,
    arXiv:2505.11821). [S].

    A_O is GRPO's advantage of the outcome, the reward of the part's last turn, among those of its
    group and agent. A_T is the same of the turn's own reward among turns of the same number that
    are no outcomes; the only one has 0. Without ``divide_by_std`` both are centred alone. Returns
    are undiscounted.
    """
    parts = outcomes.parts()
    last = torch.zeros(len(outcomes.rewards), dtype=torch.bool)
    last[[turns[-1] for turns in parts.values() if turns]] = True
    rewards = outcomes.rewards.tolist()
    ends = {part: rewards[turns[-1]] if turns else 0.0 for part, turns in parts.items()}
    outcome = _of_parts(outcomes, ends, divide_by_std, epsilon)
    numbers = _numbers(outcomes)
    ended = last.tolist()
    keys = []
    for of, number, end in zip(_who(outcomes), numbers, ended, strict=True):
        keys.append((*of, -1 if end else number))
    own = compare_within(
        outcomes.rewards,
        keys,
        divide_by_std=divide_by_std,
        epsilon=epsilon,
        lone=False,
    )
    advantages = torch.where(last, outcome, own + weight * outcome)
    return TurnAdvantages(advantages=advantages, returns=_discounted(outcomes, 1.0))


def magrpo(outcomes: TurnOutcomes, *, discount: float = 1.0) -> TurnAdvantages:
    """Subtract from the team's return ``R_t`` the mean of its group's episodes at the same turn
    (MAGRPO, arXiv:2508.04652). [S].

    The agents of an episode are a team: the reward of round t is the sum over its turns, one of
    each agent, and ``R_t = sum over k >= t of discount^(k - t) r_k``. Every turn of the round has
    the team's advantage. Siblings are
    aligned: the g-th answer of one agent met the g-th of the others. A round that one episode alone
    came to has 0. Nothing is divided by a std. Returns are the R_t.
    """
    rewards = outcomes.rewards.tolist()
    returns = [0.0] * len(outcomes.rewards)
    for rounds in outcomes.rounds():
        total = 0.0
        for turns in reversed(rounds):
            total = fsum(rewards[turn] for turn in turns) + discount * total
            for turn in turns:
                returns[turn] = total
    totals = _like_rewards(outcomes, returns)
    numbers = _numbers(outcomes)
    keys = [(*of, number) for of, number in zip(_who(outcomes), numbers, strict=True)]
    advantages = compare_within(totals, keys, divide_by_std=False, epsilon=_EPSILON, lone=False)
    return TurnAdvantages(advantages=advantages, returns=totals)


def _who(outcomes: TurnOutcomes) -> list[tuple[Hashable, ...]]:
    """Return the group and the agent of each turn. [S]."""
    rows = outcomes.row_of_turn
    groups = outcomes.rows.group_ids[rows].tolist()
    agents = outcomes.rows.agents[rows].tolist()
    return list(zip(groups, agents, strict=True))


def _numbers(outcomes: TurnOutcomes) -> list[int]:
    """Return the number of each turn in its part, from 0. [S]."""
    numbers = [0] * len(outcomes.rewards)
    for turns in outcomes.parts().values():
        for number, turn in enumerate(turns):
            numbers[turn] = number
    return numbers


def _discounted(outcomes: TurnOutcomes, discount: float) -> Tensor:
    """Return ``R_t = r_t + discount R_(t + 1)`` within each part. [S] float32."""
    rewards = outcomes.rewards.tolist()
    returns = [0.0] * len(outcomes.rewards)
    for turns in outcomes.parts().values():
        total = 0.0
        for turn in reversed(turns):
            total = returns[turn] = rewards[turn] + discount * total
    return _like_rewards(outcomes, returns)


def _sums(outcomes: TurnOutcomes) -> dict[int, float]:
    """Return the summed reward of each part."""
    rewards = outcomes.rewards.double().tolist()
    sums = {}
    for part, turns in outcomes.parts().items():
        sums[part] = _sum([rewards[turn] for turn in turns])
    return sums


def _sum(numbers: list[float]) -> float:
    """Return the exactly rounded sum; what is not finite is added up plainly, where fsum may
    raise.
    """
    total = sum(numbers)
    return fsum(numbers) if total - total == 0 else total


def _of_parts(
    outcomes: TurnOutcomes,
    numbers: dict[int, float],
    divide_by_std: bool,
    epsilon: float,
) -> Tensor:
    """Compare a number of each part with those of its group and agent, and give the result to
    its turns. [S].
    """
    members = outcomes.rows.members()
    rows = outcomes.rows
    groups = rows.group_ids.tolist()
    agents = rows.agents.tolist()
    part_of = rows.parts.tolist()
    order = list(members)
    keys = [(groups[members[part][0]], agents[members[part][0]]) for part in order]
    values = torch.tensor([numbers[part] for part in order], dtype=torch.float32)
    compared = compare_within(values, keys, divide_by_std=divide_by_std, epsilon=epsilon)
    place = {part: at for at, part in enumerate(order)}
    of_row = torch.tensor([place[part] for part in part_of], dtype=torch.int64)
    return compared[of_row][outcomes.row_of_turn]


def _like_rewards(outcomes: TurnOutcomes, numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=outcomes.rewards.device)
