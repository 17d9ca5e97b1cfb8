"""A backend of metrics has four methods, all of which one thread of its own calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The run, as a backend gets to know it."""

    id: str
    """21 lower-case hexadecimal digits, the same for every start of the run; ``--fresh`` makes a
    new one."""
    name: str
    url: str
    """Folder of the run."""
    project: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration as plain data: groups of values."""

    def settings(self) -> dict[str, Any]:
        """Return the configuration by full keys, such as ``trainer.fsdp.offload``."""
        return dict(_leaves(self.config))


class TrackerBackend(Protocol):
    """Takes the metrics of one run. It may raise anything and take any time: see ``Outlet``."""

    def begin(self, run: TrackedRun) -> None:
        """Open the run; one with this id is gone on with where there is one."""
        ...

    def rewind(self, step: int) -> None:
        """Note that the records of the steps from ``step`` on come again, once the run has
        begun.
        """
        ...

    def write(self, record: Record) -> None:
        """Take the record of a step, or of a validation or test."""
        ...

    def end(self, status: Status) -> None:
        """Note how the run ended, and send what is left."""
        ...


def named_values(record: Record) -> dict[str, float]:
    """Return the values of a record: training metrics by their own name, others as
    ``validation/reward/mean``.
    """
    prefix = ""
    if record["phase"] != "train":
        prefix = f"{record['phase']}/"
    return {prefix + name: value for name, value in record["metrics"].items() if value is not None}


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
