"""Records of a run's steps as the page holds them: a bounded number, in order, the newest known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from siirl_dask.observe import Record
from siirl_dask.planner import Phase


def thinned(records: Sequence[Record], most: int) -> list[Record]:
    """Return at most ``most`` records, ascending: all if they are as few, else the newest half of
    that and an even choice of those before. Validations and tests go last.
    """
    if len(records) <= most:
        return list(records)
    newest = list(records[-(most // 2) :])
    older = records[: -(most // 2)]
    rare = [record for record in older if record["phase"] != Phase.TRAIN]
    often = [record for record in older if record["phase"] == Phase.TRAIN]
    room = most - len(newest)
    rare = _evenly(rare, max(room // 2, room - len(often)))
    kept = [*rare, *_evenly(often, room - len(rare))]
    return [*sorted(kept, key=lambda record: record["step"]), *newest]


def _evenly(records: Sequence[Record], most: int) -> list[Record]:
    if len(records) <= most:
        return list(records)
    return [records[index * len(records) // most] for index in range(most)]


def merged(earlier: Sequence[Record], later: Sequence[Record]) -> list[Record]:
    """Return the records of both by step; of two of one step and phase, that of ``later``."""
    found = {(record["step"], record["phase"]): record for record in (*earlier, *later)}
    return sorted(found.values(), key=lambda record: (record["step"], _order(record["phase"])))


def _order(phase: Phase) -> int:
    return (Phase.TRAIN, Phase.VALIDATION, Phase.TEST).index(phase)


def latest(records: Sequence[Record]) -> Mapping[str, float | None]:
    """Return the metrics of the newest training step; none before the first."""
    return next(
        (record["metrics"] for record in reversed(records) if record["phase"] == Phase.TRAIN), {}
    )
