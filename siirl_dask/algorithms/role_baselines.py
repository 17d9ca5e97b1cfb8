"""Running baselines of roles in zero-sum games: RAE of SPIRAL (arXiv:2506.24119).

In a zero-sum game the mean over a group says nothing of how well its episodes were played: what one
side wins the other loses. What a role can expect (who moves first may win more often) is told by
its own past.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from siirl_dask.context import Device, HoldsNoGroups, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.planner import RoleCost, builds


class RoleBaselines(HoldsNoGroups):
    """A running mean of the rewards of each role: ``b <- decay b + (1 - decay) r``, 0 before the
    first reward.

    All workers of a role call ``update`` with the same rewards in the same order, and so hold the
    same baselines.
    """

    def __init__(self, decay: float = 0.95) -> None:
        """ConfigError when ``decay`` is not from 0 to below 1."""
        if not 0 <= decay < 1:
            raise ConfigError(
                f"decay={decay} of role baselines: expected 0 to below 1 (the paper has 0.95)"
            )
        self._decay = decay
        self._baselines: dict[str, float] = {}

    def advantages(self, rewards: Sequence[float], roles: Sequence[str]) -> list[float]:
        """Return ``r - b`` of each reward, with the baselines as they are. [R], [R] -> [R]."""
        return [
            reward - self._baselines.get(role, 0.0)
            for reward, role in zip(rewards, roles, strict=True)
        ]

    def update(self, rewards: Iterable[tuple[str, float]]) -> None:
        """Take in the reward of each part, with its role, one after the other. Numbers that are not
        finite are left out.
        """
        for role, reward in rewards:
            if isfinite(reward):
                self._baselines[role] = (
                    self._decay * self._baselines.get(role, 0.0) + (1 - self._decay) * reward
                )

    @property
    def baselines(self) -> Mapping[str, float]:
        """The baseline of each role that had a reward."""
        return dict(self._baselines)

    def state(self) -> dict[str, Any]:
        """Return the state that ``load_state`` resumes from."""
        return {"baselines": dict(self._baselines)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of ``state``. ValueError for numbers that are not finite."""
        loaded = {str(role): float(number) for role, number in state["baselines"].items()}
        if bad := {role: number for role, number in loaded.items() if not isfinite(number)}:
            raise ValueError(f"baselines {bad}: expected finite numbers")
        self._baselines = loaded


def check_role_baselines(
    options: Mapping[str, Any], workers: Sequence[str], config: object
) -> RoleCost:
    """The preflight of ``build_role_baselines``: baselines are a few numbers. ConfigError for an
    impossible decay.
    """
    RoleBaselines(**options)
    return RoleCost(memory=0)


@builds(preflight=check_role_baselines)
def build_role_baselines(device: Device, rank: Rank, *, decay: float = 0.95) -> RoleBaselines:
    """Build a role's RoleBaselines. Every rank holds equal ones, and none uses its device."""
    return RoleBaselines(decay)
