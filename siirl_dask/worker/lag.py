"""The turns a worker has gone through, for nodes that take their rows from an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from siirl_dask.coordinator.messages import Turn
from siirl_dask.planner import Behind, Chain


class History:
    """``chains`` are those of all workers, by phase: what one of them still needs, another has."""

    def __init__(self, chains: Mapping[str, Iterable[Chain]]) -> None:
        behind = {phase: _most_behind(found) for phase, found in chains.items()}
        self._behind = {phase: steps for phase, steps in behind.items() if steps}
        self._turns: list[Turn] = []

    def enter(self, turn: Turn, completed: int) -> int:
        """Begin ``turn`` when all workers have completed the turns before number ``completed``. Returns the number of
        the turn before which nothing is needed any more.
        """
        if turn.phase in self._behind:
            self._turns.append(turn)
        needed = completed
        for phase, steps in self._behind.items():
            done = [past.sequence for past in self._turns if past.phase == phase and past.sequence < completed]
            needed = min([needed, *done[-steps:]])
        self._turns = [past for past in self._turns if past.sequence >= needed]
        return needed

    def earlier(self, turn: Turn, steps: int) -> Turn | None:
        """The turn of ``steps`` steps before, itself if it settles; None if it had no such since the last that did."""
        if turn.settles:
            return turn
        since: list[Turn] = []
        for past in self._turns:
            if past.phase == turn.phase:
                since = [] if past.settles else [*since, past]
        return since[-1 - steps] if len(since) > steps else None


def _most_behind(chains: Iterable[Chain]) -> int:
    return max((link.steps for chain in chains for link in chain.links if isinstance(link, Behind)), default=0)
