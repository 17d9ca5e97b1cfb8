"""Profiles nodes of some steps with torch's profiler: a Chrome trace for each node, step and
worker.

The files lie in ``<run.url>/profile/step=000003/<node>.<worker>.json.gz``; https://ui.perfetto.dev
opens them as they are. A profile that cannot be taken or written costs the profile and never the
run.
"""

from __future__ import annotations

import gzip
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from siirl_storage import open_fs, write_atomic

from siirl_dask.config import ProfileConfig
from siirl_dask.context import Device, Rank
from siirl_dask.devices.profiler import Profiler, make_profiler
from siirl_dask.planner import Iteration, Node, Phase
from siirl_dask.tables import step_folder

logger = logging.getLogger("siirl_dask.worker")
FOLDER = "profile"


class Profiling:
    """Takes the profiles of one worker. Without ``steps`` it does nothing."""

    def __init__(self, config: ProfileConfig, run_url: str, device: Device) -> None:
        self._config = config
        self._url = run_url
        self._device = device

    def of(self, node: Node, iteration: Iteration, rank: Rank) -> AbstractContextManager[None]:
        """Return a context manager that profiles the code inside, if the config names the step,
        role and rank.
        """
        config = self._config
        if iteration.step not in config.steps or iteration.phase.counts_as is not Phase.TRAIN:
            return nullcontext()
        if config.roles and node.role not in config.roles:
            return nullcontext()
        if config.ranks and rank.rank not in config.ranks:
            return nullcontext()
        return self._profiled(node, iteration)

    @contextmanager
    def _profiled(self, node: Node, iteration: Iteration) -> Iterator[None]:
        try:
            profiler = make_profiler(self._device.kind, self._config.level)
            profiler.start()
        except Exception as error:  # the device's library is missing, or refuses
            _warn(node, iteration, error)
            yield
            return
        try:
            yield
        finally:
            try:
                profiler.stop()
                self._write(profiler, node, iteration)
            except Exception as error:  # each store and each device's library has errors of its own
                _warn(node, iteration, error)

    def _write(self, profiler: Profiler, node: Node, iteration: Iteration) -> None:
        name = re.sub(r"[^\w.-]", "_", f"{node.name}.{self._device.worker}")
        with tempfile.TemporaryDirectory(prefix="siirl-profile-") as folder:
            path = Path(folder) / f"{name}.json"
            profiler.export_chrome_trace(str(path))
            packed = gzip.compress(path.read_bytes(), compresslevel=3)
        fs, step_path = open_fs(step_folder(self._url, FOLDER, iteration.step))
        write_atomic(fs, f"{step_path}/{name}.json.gz", packed)


def _warn(node: Node, iteration: Iteration, error: Exception) -> None:
    where = f"node {node.name!r}, {iteration}"
    logger.warning("there is no profile of %s: %s: %s", where, type(error).__name__, error)
