"""Clusters that are started process by process, as a user starts them with Dask's commands."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

MAIN = "; from distributed.cli.dask_{} import main; main()"
QUIET = ["--no-dashboard", "--host", "127.0.0.1"]


@pytest.fixture
def processes():
    """Starts Dask's processes as its commands do, each after a line of Python."""
    with ExitStack() as ended:

        def start(kind, *arguments, before="pass", environment=None, folder=None):
            command = [sys.executable, "-c", before + MAIN.format(kind), *arguments]
            process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            ended.callback(process.wait)
            ended.callback(process.kill)

        yield start


@pytest.fixture
def cluster(processes, tmp_path):
    """Starts a scheduler, and a worker for each name, and returns a client of them."""
    # not at the top: Dask would take pytest's log handlers for its own
    from distributed import Client

    with ExitStack() as closed:

        def start(scheduler="pass", **workers):
            file = tmp_path / "scheduler.json"
            processes(
                "scheduler", "--scheduler-file", str(file), *QUIET, "--port", "0", before=scheduler
            )
            for name, how in workers.items():
                options = dict(how)
                processes(
                    "worker",
                    *options.pop("arguments", ()),
                    "--scheduler-file",
                    str(file),
                    "--name",
                    name,
                    "--no-nanny",
                    *QUIET,
                    "--nthreads",
                    "1",
                    **options,
                )
            client = closed.enter_context(Client(scheduler_file=str(file), timeout=120))
            client.wait_for_workers(len(workers), timeout=120)
            return client

        yield start
