"""Writes a worker's parts of checkpoints, one after the other, while the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from siirl_storage.digests import FileDigest

from siirl_dask.errors import CheckpointError
from siirl_dask.planner import Iteration
from siirl_dask.trace import Lane, Recorder
from siirl_dask.worker.phase_loaders import PhaseLoaders
from siirl_dask.worker.role_state import RoleStates
from siirl_dask.worker.stop import StopFlag, finished


class CheckpointWriter:
    """Saves the roles' states and the dataloaders' positions, and reports when they are taken and when written."""

    def __init__(
        self,
        states: RoleStates,
        loaders: PhaseLoaders,
        report: Callable[[dict[str, Any]], None],
        loop: asyncio.AbstractEventLoop,
        stop: StopFlag,
        trace: Recorder,
    ) -> None:
        self._states, self._loaders = states, loaders
        self._report, self._loop, self._stop = report, loop, stop
        self._trace = trace
        self._written: Future[None] | None = None

    def save(self, iteration: Iteration, url: str) -> None:
        """Begin to write this worker's part of a checkpoint at ``url``, once that of the previous one is written."""
        with self._trace.span(Lane.STORAGE, "save", "checkpoint"):
            if self._written is not None:
                finished(self._written, self._stop)
            saved = self._states.save(url)
        self._written = asyncio.run_coroutine_threadsafe(self._report_written(iteration, saved.writes), self._loop)
        saved_data = {**saved.as_data(), "positions": self._loaders.positions}
        self._report({"kind": "done", "sequence": iteration.sequence, "metrics": {}, "saved": saved_data})

    async def _report_written(self, iteration: Iteration, writes: Mapping[str, Future[dict[str, FileDigest]]]) -> None:
        began = time.monotonic_ns()
        try:
            written = await asyncio.gather(*map(asyncio.wrap_future, writes.values()))
        except CheckpointError as error:
            self._report({"kind": "unsaved", "what": f"{iteration}: {error}"})
        else:
            files: dict[str, tuple[int, str]] = {}
            for role, digests in zip(writes, written, strict=True):
                files |= {f"{role}/{name}": (one.nbytes, one.sha256) for name, one in digests.items()}
            total = sum(nbytes for nbytes, _ in files.values())
            self._trace.add(Lane.STORAGE, "write", "checkpoint", began, amount=total)
            self._report({"kind": "written", "sequence": iteration.sequence, "files": files})
