"""Advantages of rows that several agents wrote: whom each is compared with.

Statistics stay within a group and count the parts of episodes (``turn_outcomes.py``), however many
segments a part has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from siirl_dask.algorithms.advantages import check_shapes
from siirl_dask.algorithms.comparisons import compare_within
from siirl_dask.algorithms.turn_outcomes import EpisodeRows

_EPSILON = 1e-6  # as in grpo


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOutcomes:
    """R rows that were scored, in complete groups. ValueError when the shapes differ."""

    rows: EpisodeRows
    rewards: Tensor
    """[R] float32 reward of each row; a part's reward is the sum of its rows'."""
    names: Sequence[str] = ("",)
    """Name of each agent, by its number in ``rows.agents``."""
    proposals: Tensor | None = None
    """[R] int64 number of the proposal that a row is, or answers; None where no column says so."""

    def __post_init__(self) -> None:
        check_shapes("[R]", rewards=self.rewards, agents=self.rows.agents, proposals=self.proposals)


AgentAdvantageFn = Callable[[AgentOutcomes], Tensor]
"""``AgentOutcomes -> advantages [R] float32``."""


def dr_mas(
    outcomes: AgentOutcomes, *, divide_by_std: bool = True, epsilon: float = _EPSILON
) -> Tensor:
    """Standardise rewards over the parts of the same agent in the group, ``(R - mean_k) / (std_k +
    epsilon)`` (Dr. MAS, arXiv:2602.08847). [R].

    With statistics over all agents, one whose rewards lie elsewhere, or who takes part more often,
    gets advantages that are no advantages, and gradients that blow up. Without ``divide_by_std``
    the mean is subtracted alone. A part that is alone keeps mean 0 and std 1.
    """
    groups = outcomes.rows.group_ids.tolist()
    agents = outcomes.rows.agents.tolist()
    keys = list(zip(groups, agents, strict=True))
    return _compare_parts(outcomes, _rewards(outcomes), keys, divide_by_std, epsilon)


def hierarchical_grpo(
    outcomes: AgentOutcomes,
    *,
    proposer: str,
    mean_of_answers: bool = False,
    divide_by_std: bool = True,
    epsilon: float = _EPSILON,
) -> Tensor:
    """Compare proposers with proposers of the same prompt, and others with those that answer the
    same proposal. [R].

    Each is GRPO (arXiv:2402.03300) in its own set, as in verifiers' hierarchical GRPO: what a
    proposal is worth does not count for those who answer it. With ``mean_of_answers`` a proposer's
    reward is the mean reward of the parts that answer it, plus its own. ValueError without
    ``proposals``, and where no agent is called ``proposer``.
    """
    if outcomes.proposals is None:
        raise ValueError(
            "hierarchical_grpo needs the proposal of each row: name its column in the node's "
            "'proposal'"
        )
    if len(outcomes.rewards) and proposer not in outcomes.names:
        raise ValueError(
            f"proposer={proposer!r}: expected one of the agents {sorted(outcomes.names)}"
        )
    proposals = outcomes.proposals.tolist()
    groups = outcomes.rows.group_ids.tolist()
    agents = [outcomes.names[agent] for agent in outcomes.rows.agents.tolist()]
    proposes = [agent == proposer for agent in agents]
    keys: list[Hashable] = []
    for row, agent in enumerate(agents):
        proposal = None if proposes[row] else proposals[row]
        keys.append((groups[row], agent, proposal))
    rewards = _rewards(outcomes)
    if mean_of_answers:
        members = outcomes.rows.members()
        answers: dict[int, list[float]] = {}
        for part, rows in members.items():
            if not proposes[rows[0]]:
                answers.setdefault(proposals[rows[0]], []).append(rewards[part])
        for part, rows in members.items():
            if proposes[rows[0]] and (given := answers.get(proposals[rows[0]])):
                rewards[part] += fsum(given) / len(given)
    return _compare_parts(outcomes, rewards, keys, divide_by_std, epsilon)


def _rewards(outcomes: AgentOutcomes) -> dict[int, float]:
    """Return the reward of each part: the sum of its rows'."""
    rewards = outcomes.rewards.tolist()
    sums = {}
    for part, rows in outcomes.rows.members().items():
        sums[part] = sum(rewards[row] for row in rows)
    return sums


def _compare_parts(
    outcomes: AgentOutcomes,
    rewards: Mapping[int, float],
    keys: Sequence[Hashable],
    divide_by_std: bool,
    epsilon: float,
) -> Tensor:
    """Compare each part's reward with those of parts with the same key, and give the result to
    its rows. [R].
    """
    members = outcomes.rows.members()
    values = torch.tensor([rewards[part] for part in members], dtype=torch.float32)
    first = [keys[rows[0]] for rows in members.values()]
    compared = compare_within(values, first, divide_by_std=divide_by_std, epsilon=epsilon)
    advantages = torch.zeros(len(outcomes.rewards))
    for at, rows in enumerate(members.values()):
        advantages[rows] = compared[at]
    return advantages
