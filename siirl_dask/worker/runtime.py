"""What a worker has at hand while it runs its chains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from siirl_dask.context import Device, Peers, Rank
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.planner import Iteration, Node
from siirl_dask.worker.stop import StopFlag
from siirl_dask.worker.weight_broadcast import Broadcast

Meter = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRuntime:
    """The built roles of one worker and its connections, made once a run."""

    device: Device
    run_url: str
    run_seed: int
    resources: Mapping[str, Any]
    """What each role of this worker built, by the role's name."""
    ranks: Mapping[str, Rank]
    peers: Mapping[str, Peers]
    """Collectives among the workers of each of its roles."""
    share_work: Callable[[Iteration, Node, Sequence[Any], Any], Any] | None
    """Makes a node's items of work open to idle peers; None where stealing is off."""
    databuffer: Databuffer
    loop: asyncio.AbstractEventLoop
    """The event loop that the databuffer lives on; chains run in another thread."""
    stop: StopFlag
    meter: Meter
    """Shows a link's time by its name wherever the process is watched."""
    stream_bytes: int
    """Largest table of a weight stream, unless one parameter is larger."""
    broadcasts: Mapping[tuple[str, ...], Broadcast] = field(default_factory=dict)
    """The run's broadcasts, by the workers that take part; a stream that one can bring goes by it."""
    node_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What nodes remember from one step to the next (``Context.state``), by phase and name."""
    running: list[str] = field(default_factory=list)
    """The node whose function runs now, with its iteration; empty between nodes."""
