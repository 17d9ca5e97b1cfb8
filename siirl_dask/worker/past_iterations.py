"""Remembers past iterations for nodes with a lag, which take their rows from an earlier
iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from siirl_dask.planner import Chain, Iteration, Lagged, Phase, phase_of


class PastIterations:
    """Holds the iterations of phases with lagged links, back to the oldest whose rows a link may
    still need.

    ``chains`` are those of all workers, by plan: another worker holds the rows that one worker
    needs.
    """

    def __init__(self, chains: Mapping[str, Iterable[Chain]]) -> None:
        self._lags: dict[Phase, int] = {}
        for plan, workers in chains.items():
            phase = phase_of(plan).counts_as
            steps = max(_largest_lag(workers), self._lags.get(phase, 0))
            if steps:
                self._lags[phase] = steps
        self._iterations: list[Iteration] = []

    def begin(self, iteration: Iteration, completed: int) -> int:
        """Begin an iteration, and return the sequence number before which no rows are needed any
        more.

        All workers have completed the iterations before number ``completed``.
        """
        if iteration.phase.counts_as in self._lags:
            self._iterations.append(iteration)
        needed = completed
        for phase, steps in self._lags.items():
            sequences = (
                past.sequence for past in self._iterations if past.phase.counts_as == phase
            )
            done = [sequence for sequence in sequences if sequence < completed]
            needed = min([needed, *done[-steps:]])
        self._iterations = [past for past in self._iterations if past.sequence >= needed]
        return needed

    def lagged(self, iteration: Iteration, steps: int) -> Iteration | None:
        """Return the iteration ``steps`` steps earlier, or ``iteration`` itself when the pipeline
        drains.

        None while there have been fewer than that since the last drain.
        """
        if iteration.drain:
            return iteration
        since_drain = self._since_drain(iteration.phase.counts_as)
        return since_drain[-1 - steps] if len(since_drain) > steps else None

    def earlier(self, iteration: Iteration, steps: int) -> list[Iteration]:
        """Return the iterations since the last drain whose lagged links may run in ``iteration``,
        at their place or before it: at most ``steps``, oldest first.
        """
        return self._since_drain(iteration.phase.counts_as, before=iteration.sequence)[-steps:]

    def skipped(self, iteration: Iteration, steps: int) -> list[Iteration]:
        """Return the iterations whose lagged links never run because ``iteration`` drains and
        runs its own instead.
        """
        return self.earlier(iteration, steps) if iteration.drain else []

    def _since_drain(self, phase: Phase, before: int | None = None) -> list[Iteration]:
        """Return the iterations of a phase since its last drain, of all or of those before a
        sequence number.
        """
        since_drain: list[Iteration] = []
        for past in self._iterations:
            if past.phase.counts_as != phase or (before is not None and past.sequence >= before):
                continue
            if past.drain:
                since_drain.clear()
            else:
                since_drain.append(past)
        return since_drain


def _largest_lag(chains: Iterable[Chain]) -> int:
    steps = 0
    for chain in chains:
        for link in chain.links:
            if isinstance(link, Lagged):
                steps = max(steps, link.steps)
    return steps
