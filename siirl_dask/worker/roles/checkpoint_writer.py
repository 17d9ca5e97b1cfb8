"""Writes a worker's parts of checkpoints, one after the other, while the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from siirl_storage import FileDigest

from siirl_dask.errors import CheckpointError
from siirl_dask.planner import Iteration
from siirl_dask.trace import Lane, Recorder
from siirl_dask.worker.phase_loaders import PhaseLoaders
from siirl_dask.worker.roles.role_state import RoleStates
from siirl_dask.worker.stop import StopFlag, result_of


class CheckpointWriter:
    """Saves the roles' states and the dataloaders' positions, and reports when they are copied
    and when written.
    """

    def __init__(
        self,
        states: RoleStates,
        loaders: PhaseLoaders,
        report: Callable[[dict[str, Any]], None],
        loop: asyncio.AbstractEventLoop,
        stop: StopFlag,
        trace: Recorder,
    ) -> None:
        self._states = states
        self._loaders = loaders
        self._report = report
        self._loop = loop
        self._stop = stop
        self._trace = trace
        self._written: Future[None] | None = None

    def save(self, iteration: Iteration, url: str) -> None:
        """Begin to write this worker's part of a checkpoint at ``url``, once that of the
        previous one is written.
        """
        with self._trace.span(Lane.STORAGE, "save", "checkpoint"):
            if self._written is not None:
                result_of(self._written, self._stop)
            saved = self._states.save(url)
        self._written = asyncio.run_coroutine_threadsafe(
            self._report_written(iteration, saved.writes), self._loop
        )
        saved_data = {**saved.as_data(), "positions": self._loaders.positions}
        self._report(
            {"kind": "done", "sequence": iteration.sequence, "metrics": {}, "saved": saved_data}
        )

    async def _report_written(
        self, iteration: Iteration, writes: Mapping[str, Future[dict[str, FileDigest]]]
    ) -> None:
        started = time.monotonic_ns()
        try:
            written = await asyncio.gather(*map(asyncio.wrap_future, writes.values()))
        except CheckpointError as error:
            self._report({"kind": "unsaved", "what": f"{iteration}: {error}"})
        else:
            files: dict[str, tuple[int, str]] = {}
            for role, digests in zip(writes, written, strict=True):
                files |= {
                    f"{role}/{name}": (digest.nbytes, digest.sha256)
                    for name, digest in digests.items()
                }
            total = sum(nbytes for nbytes, _ in files.values())
            self._trace.add(Lane.STORAGE, "write", "checkpoint", started, amount=total)
            self._report({"kind": "written", "sequence": iteration.sequence, "files": files})
