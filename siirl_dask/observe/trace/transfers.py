"""Bytes from worker to worker, as a trace has them: each worker counts what comes to it, by
source and way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.trace import Lane, Recorder

SHARED = "shared memory"
SENT = "messages"
"""Ways from worker to worker."""
_MOST = 128  # sources of an iteration that are recorded one by one, those with the most bytes
_FROM = "from "


@dataclass(slots=True)
class Transfers:
    """Bytes from worker to worker."""

    ways: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    """{(source, target): {way: bytes}}."""

    @property
    def workers(self) -> list[str]:
        """Workers that sent or received anything, numbers by value."""
        return in_order({name for pair in self.ways for name in pair})

    @property
    def total(self) -> int:
        return sum(ways.total() for ways in self.ways.values())


def record_transfers(
    trace: Recorder,
    before: Mapping[str, int],
    now: Mapping[str, int],
    shared: tuple[Mapping[str, int], ...],
    at: int,
) -> None:
    """Record the bytes that came from each worker since ``before``, of which ``shared``, before and
    now, came through shared memory.
    """
    came = Counter({worker: total - before.get(worker, 0) for worker, total in now.items()})
    shared_before, shared_now = shared
    for worker, total in came.most_common(_MOST):
        through_memory = shared_now.get(worker, 0) - shared_before.get(worker, 0)
        for way, nbytes in ((SHARED, through_memory), (SENT, total - through_memory)):
            if nbytes > 0:
                trace.add(
                    Lane.TRANSFER, "count", f"{_FROM}{worker} by {way}", at, at, amount=nbytes
                )


def transfers(spans: Sequence[TraceSpan]) -> Transfers:
    """Return the bytes of all steps of the spans."""
    found = Transfers()
    for span in spans:
        if span.is_count and span.lane is Lane.TRANSFER and span.name.startswith(_FROM):
            source, _, way = span.name.removeprefix(_FROM).rpartition(" by ")
            found.ways.setdefault((source, span.worker), Counter())[way] += span.amount or 0
    return found
