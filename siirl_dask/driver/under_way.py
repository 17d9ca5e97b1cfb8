"""Iterations and checkpoints, those under way and those that are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Future
from siirl_storage import Part
from siirl_storage.digests import FileDigest

from siirl_dask.context import Metric
from siirl_dask.planner import Iteration


@dataclass(frozen=True, slots=True)
class Done:
    """An iteration that every worker has completed."""

    iteration: Iteration
    seconds: float
    """Seconds since the previous iteration was done, or since the start."""
    metrics: dict[str, Metric]
    """Metrics of all workers, merged."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A table of a step of which every worker has written its part; the step itself may go on."""

    iteration: Iteration
    table: str
    parts: list[Part]
    metrics: dict[str, Metric]
    """Metrics that the workers had logged of the step by then, merged."""
    position: int | None
    """Number of the dataloader's next prompt, where the step has drawn more prompts than its own."""


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint whose parts are all written."""

    iteration: Iteration
    url: str
    saved: list[Mapping[str, Any]]
    """Reports of the workers on their parts, in rank order."""
    files: dict[str, FileDigest]
    """Digests of all files by path in the folder, as they were written."""


@dataclass(slots=True)
class Pending:
    """An iteration under way, and the metrics of the workers that have completed it."""

    iteration: Iteration
    futures: dict[str, Future[Any]]
    logged: dict[str, dict[str, Metric]] = field(default_factory=dict)


@dataclass(slots=True)
class Writing:
    """A checkpoint that is being written, and the workers that have written their part."""

    iteration: Iteration
    url: str
    saved: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    written: dict[str, dict[str, FileDigest]] = field(default_factory=dict)
