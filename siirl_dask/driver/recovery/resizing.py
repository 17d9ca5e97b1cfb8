"""Spreads the roles of a placement over more or fewer workers than it names: each worker keeps its
roles.

Workers that a placement gives the same roles are of one kind, and the number of them is the kind's
share: with ``{rollout: [0, 1], policy: [2, 3, 4]}`` there are two kinds with shares 2 and 3. Roles
that are not in the placement are on all workers, of any number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

Kind = frozenset[str]
"""The roles of a placement that a worker has."""
_MOST_MOVED = 7  # workers from one kind to another: enough for groups of eight ranks


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of workers of a placement, in the order in which they come first, and the share
    of each.
    """

    shares: Mapping[Kind, int]

    @staticmethod
    def of(placement: Mapping[str, Sequence[int]], workers: int) -> Kinds:
        """Return the kinds of a placement on ``workers`` workers."""
        shares: dict[Kind, int] = {}
        for kind in kinds_of(placement, range(workers)).values():
            shares[kind] = shares.get(kind, 0) + 1
        return Kinds(shares)

    @property
    def roles(self) -> Kind:
        """All roles of the placement."""
        return frozenset().union(*self.shares)

    def assign(
        self,
        before: Mapping[str, Kind],
        there: Sequence[str],
        count: int,
    ) -> Iterator[dict[str, Kind]]:
        """Yield ways to give ``count`` of the workers ``there`` a kind, so that every role has a
        worker.

        The first moves nobody of ``before`` to another kind, unless a role would be without a
        worker; the next ones move one worker, then two and so on. Newcomers get the kind that lacks
        most workers of its share. Nothing is yielded where there are too few workers.
        """
        first = self._stay(before, there, count)
        if first is None:
            return
        yield first
        for moved in range(1, _MOST_MOVED + 1):
            for source, target in permutations(self.shares, 2):
                movable = [worker for worker in first if first[worker] == source][-moved:]
                changed = {**first, **dict.fromkeys(movable, target)}
                if len(movable) == moved and self._covers(changed):
                    yield changed

    def _stay(
        self,
        before: Mapping[str, Kind],
        there: Sequence[str],
        count: int,
    ) -> dict[str, Kind] | None:
        """Return a kind for ``count`` workers; those of ``before`` have theirs. None where a
        role would have none.
        """
        given = {worker: before[worker] for worker in there if worker in before}
        for worker in there:
            if worker not in given:
                given[worker] = self._neediest(given)
        while not self._covers(given):
            moved = self._spare(given)
            if moved is None:
                return None
            given[moved] = self._neediest(given)
        while len(given) > count:
            dropped = self._spare(given)
            if dropped is None:
                return None
            del given[dropped]
        if len(given) != count:
            return None
        return {worker: given[worker] for worker in there if worker in given}

    def _neediest(self, given: Mapping[str, Kind]) -> Kind:
        """Return the kind of the next worker: one with a role that nobody has, else that of
        which most are missing.
        """
        lacking = self.roles.difference(*given.values())

        def need(kind: Kind) -> tuple[int, float]:
            return len(kind & lacking), self.shares[kind] / (1 + self._size(kind, given))

        return max(self.shares, key=need)

    def _spare(self, given: Mapping[str, Kind]) -> str | None:
        """Return a worker whose roles others have as well, of the kind with most workers beside
        its share; the last.
        """
        for kind in sorted(
            self.shares, key=lambda kind: self._size(kind, given) / self.shares[kind], reverse=True
        ):
            for worker in reversed([worker for worker in given if given[worker] == kind]):
                others = {other: its for other, its in given.items() if other != worker}
                if self._lost(others) == self._lost(given):
                    return worker
        return None

    def _size(self, kind: Kind, given: Mapping[str, Kind]) -> int:
        return sum(its == kind for its in given.values())

    def _lost(self, given: Mapping[str, Kind]) -> Kind:
        return self.roles.difference(*given.values())

    def _covers(self, given: Mapping[str, Kind]) -> bool:
        if not given:
            return False
        return not self._lost(given)


def kinds_of(placement: Mapping[str, Sequence[int]], workers: Sequence[int]) -> dict[int, Kind]:
    """Return the kind of each worker, by its index."""
    kinds = {}
    for worker in workers:
        kinds[worker] = frozenset(role for role, placed in placement.items() if worker in placed)
    return kinds


def placement_of(
    given: Mapping[str, Kind], workers: Sequence[str], placement: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Return the placement of ``given`` kinds on ``workers``, in rank order, for the roles of
    ``placement``.
    """
    placed = {}
    for role in placement:
        placed[role] = [index for index, worker in enumerate(workers) if role in given[worker]]
    return placed
