"""Bytes from worker to worker, as a trace has them: each worker counts what comes to it, by
source and way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from siirl_dask.observe.trace.trace_table import TraceSpan, in_order
from siirl_dask.trace import FROM, Lane


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


def transfers(spans: Sequence[TraceSpan]) -> Transfers:
    """Return the bytes of all steps of the spans."""
    found = Transfers()
    for span in spans:
        if span.is_count and span.lane is Lane.TRANSFER and span.name.startswith(FROM):
            source, _, way = span.name.removeprefix(FROM).rpartition(" by ")
            found.ways.setdefault((source, span.worker), Counter())[way] += span.amount or 0
    return found
