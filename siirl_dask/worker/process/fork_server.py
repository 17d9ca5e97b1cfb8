"""Starts the fork server: worker processes are forked from one that has imported everything a
worker needs.

The imports would take each worker seconds by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from multiprocessing import forkserver

# elsewhere libraries do not survive a fork
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_IMPORTED = [
    "siirl_dask.worker.process._hide",
    "siirl_dask.nodes",
    "siirl_dask.rollout.transformers_engine.engine",
    "siirl_dask.training.files.checkpoint",
    "siirl_dask.training.parallel.fsdp",
    "siirl_dask.training.policy",
    "siirl_dask.worker.dag_worker",
    "distributed.nanny",
    "distributed.http.worker.prometheus",
    "pandas",  # where it is installed, pyarrow imports it for the first list that becomes an array
    "siirl_dask.worker.process._freeze",
]


def prepare_processes(environment: Mapping[str, object] | None = None) -> None:
    """Start the fork server, unless it runs.

    Its processes get ``environment`` besides this process's own, from the start, since C libraries
    read it once. They block the signals that the calling thread blocks.
    """
    if START_METHOD != "forkserver":
        return
    before = dict(os.environ)
    os.environ.update(
        {name: str(value) for name, value in (environment or {}).items() if value is not None}
    )
    try:
        forkserver.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
