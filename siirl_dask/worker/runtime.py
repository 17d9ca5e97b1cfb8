"""The resources and connections of a worker, which its chains use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from siirl_dask.context import Device, Peers, Rank
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.trace import Recorder
from siirl_dask.worker.in_flight import BackgroundPulls
from siirl_dask.worker.monitoring.profiling import Profiling
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.stages import PlainWriter, StageWriter
from siirl_dask.worker.stop import StopFlag
from siirl_dask.worker.weight_broadcast import Broadcast

Meter = Callable[[str], AbstractContextManager[object]]
Digest = Callable[[str, float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRuntime:
    """One worker's built roles and connections, made once a run."""

    device: Device
    profiling: Profiling
    """Profiles nodes of some steps."""
    run_url: str
    run_seed: int
    skip_nonfinite: bool = False
    """``run.on_nan=skip``."""
    stages: StageWriter | PlainWriter
    """Writes the parts of tables that nodes save."""
    read_limit: int = 2 * 2**30
    """Bytes that stored rows of a step, or a row group of them, may take on a worker once
    decoded."""
    resources: Mapping[str, Any]
    """The object that each of this worker's roles built, by the role's name."""
    ranks: Mapping[str, Rank]
    """Rank of this worker in each of its roles."""
    peers: Mapping[str, Peers]
    """Collectives among the workers of each of its roles."""
    share_work: Callable[..., Any] | None
    """Offers a node's work items to idle peers; None where work stealing is off."""
    databuffer: Databuffer
    loop: asyncio.AbstractEventLoop
    """The event loop that the databuffer lives on; chains run in another thread."""
    stop: StopFlag
    meter: Meter
    """Times a link under its name on Dask's dashboard."""
    digest: Digest = lambda name, value, unit: None
    """Adds an amount of a unit to a link there, such as the bytes that it received."""
    stream_bytes: int
    """Largest table of a weight stream, unless one parameter is larger."""
    broadcasts: Mapping[tuple[str, ...], Broadcast] = field(default_factory=dict)
    """Broadcasts by the workers that take part; a weight stream with one uses it."""
    overlap: bool = True
    """Whether nodes may begin with finished rows of a node above, see ``Plan.overlap``."""
    node_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of nodes that lasts from step to step (``Context.state``), by phase and name."""
    background_pulls: BackgroundPulls = field(default_factory=BackgroundPulls)
    """Rows of earlier iterations that nodes load while they run."""
    progress: TaskProgress = field(default_factory=TaskProgress)
    """Counts what gets done, and holds the node whose function is running."""

    @property
    def trace(self) -> Recorder:
        """Records how long each link takes."""
        return self.progress.trace
