"""Advantages of turns against a critic: of one agent's turns, and of a team of agents that act one
after the other.

MARFT (arXiv:2504.16129) takes the agents of an episode, in the order in which they act, for one
long sequence: what an agent says is followed by what the next one says, whose words go before, and
after the last one begins the next round. One critic serves all of them: it reads what an agent
reads, earlier agents' words included. Why that is sound is the decomposition of a team's advantage,
``A(o, a_1..n) = sum over i of A_i(o, a_1..i-1, a_i)`` (HAPPO, arXiv:2109.11251).
"""

from __future__ import annotations

import torch
from torch import Tensor

from siirl_dask.algorithms.token_advantages import TokenOutcomes, gae
from siirl_dask.algorithms.turn_outcomes import TurnAdvantages, TurnOutcomes


def turn_gae(
    outcomes: TurnOutcomes, *, discount: float = 1.0, gae_lambda: float = 1.0
) -> TurnAdvantages:
    """Estimate ``A = delta + discount gae_lambda A_next`` with turns as actions, ``delta = r +
    discount V_next - V`` (GAE, arXiv:1506.02438). [S].

    V is the critic's value before the turn's first token; what follows is the next turn of the same
    agent in the same episode, and after its last one V and A are 0. Returns are ``A + V``. A turn
    without tokens is no action: its reward goes to the turn before it. ValueError without values.
    """
    return _over_turns(outcomes, list(outcomes.parts().values()), discount, gae_lambda)


def marft(
    outcomes: TurnOutcomes, *, discount: float = 0.99, gae_lambda: float = 0.95
) -> TurnAdvantages:
    """Estimate the same over all agents of an episode in the order in which they act: MARFT at
    action level (arXiv:2504.16129). [S].

    What follows agent i's turn is the turn of agent i + 1 of the same round, and after the last
    agent's the first one's of the next round. The loss that goes with it takes one ratio for a
    turn: ``turn_clip``. ValueError without values.
    """
    return _over_turns(outcomes, _in_acting_order(outcomes), discount, gae_lambda)


def marft_tokens(
    outcomes: TurnOutcomes, *, discount: float = 0.99, gae_lambda: float = 0.95
) -> TurnAdvantages:
    """Estimate ``gae`` over the tokens of an episode's turns laid end to end in acting order: MARFT
    at token level (arXiv:2504.16129). [K].

    After an agent's last token comes the next agent's first one. A turn's reward is on its last
    token; that of a turn without tokens goes to the turn before it. ValueError without values.
    """
    values = _values(outcomes)
    offsets = outcomes.token_offsets.tolist()
    sequences = _in_acting_order(outcomes)
    rewards = torch.zeros(len(values))
    for turns in sequences:
        for turn, reward in _with_tokens(outcomes, turns):
            rewards[offsets[turn + 1] - 1] = reward
    lengths = [sum(offsets[turn + 1] - offsets[turn] for turn in turns) for turns in sequences]
    order = [
        token
        for turns in sequences
        for turn in turns
        for token in range(offsets[turn], offsets[turn + 1])
    ]
    places = torch.tensor(order, dtype=torch.int64)
    laid = TokenOutcomes(
        rewards=rewards[places],
        group_ids=torch.arange(len(sequences)),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        mask=torch.ones(len(values), dtype=torch.bool),
        values=values[places],
    )
    estimated = gae(laid, discount=discount, gae_lambda=gae_lambda)
    back = places.argsort()
    return TurnAdvantages(advantages=estimated.advantages[back], returns=estimated.returns[back])


def _over_turns(
    outcomes: TurnOutcomes,
    sequences: list[list[int]],
    discount: float,
    gae_lambda: float,
) -> TurnAdvantages:
    values = _values(outcomes).double().tolist()
    offsets = outcomes.token_offsets.tolist()
    advantages = torch.zeros(len(outcomes.rewards), dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    for turns in sequences:
        next_value = next_advantage = 0.0
        for turn, reward in reversed(_with_tokens(outcomes, turns)):
            value = values[offsets[turn]]
            next_advantage = (
                reward + discount * next_value - value + discount * gae_lambda * next_advantage
            )
            next_value = value
            advantages[turn] = next_advantage
            returns[turn] = next_advantage + value
    return TurnAdvantages(advantages=advantages.float(), returns=returns.float())


def _with_tokens(outcomes: TurnOutcomes, turns: list[int]) -> list[tuple[int, float]]:
    """Return a sequence's turns that have tokens and their rewards, with those of turns without
    any that follow.
    """
    rewards = outcomes.rewards.tolist()
    lengths = outcomes.lengths.tolist()
    kept: list[tuple[int, float]] = []
    for turn in turns:
        if lengths[turn]:
            kept.append((turn, rewards[turn]))
        elif kept:
            kept[-1] = (kept[-1][0], kept[-1][1] + rewards[turn])
    return kept


def _in_acting_order(outcomes: TurnOutcomes) -> list[list[int]]:
    return [[turn for turns in rounds for turn in turns] for rounds in outcomes.rounds()]


def _values(outcomes: TurnOutcomes) -> Tensor:
    if outcomes.values is None:
        raise ValueError(
            "this advantage needs a critic's values: add the node siirl_dask.nodes:estimate_values "
            "before it"
        )
    return outcomes.values
