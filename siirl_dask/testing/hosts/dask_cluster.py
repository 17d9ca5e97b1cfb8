"""A Dask cluster on hosts of a lab, started as people start one: ``dask scheduler`` and ``dask
worker``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from siirl_dask.testing.hosts.host import Host

_PORT = 8786


def start_interpreter(
    host: Host,
    words: Sequence[object],
    environment: Mapping[str, str],
    output: Path | None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start ``python *words`` on a host. Both what it prints and its errors go to ``output``, or
    to its ``stdout``.
    """
    command = (sys.executable, *words)
    if output is None:
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        return host.start(*command, env=environment, **pipes, **options)
    with output.open("w") as log:
        return host.start(*command, env=environment, stdout=log, stderr=subprocess.STDOUT)


class DaskCluster:
    """A scheduler on one host, and a worker on each of ``workers``, named 0, 1, 2; a host may be
    there several times.

    What they print lies in ``folder``: ``scheduler.log``, ``worker-0.log``. ``address`` is the
    scheduler's. The processes end with their hosts.
    """

    def __init__(
        self,
        scheduler: Host,
        workers: Sequence[Host],
        folder: Path,
        *,
        ipv6: bool = False,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        start: Callable[..., Any] = start_interpreter,
    ) -> None:
        """``arguments`` are further ones of ``dask worker``.

        ``start(host, words, environment, output)`` starts what ``python *words`` would, and returns
        what ``subprocess.Popen`` does; ``output`` is the file for what it prints, or None for
        ``stdout``.
        """
        self.folder = folder
        self._start_program = start
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        location = f"[{scheduler.address6}]" if ipv6 else scheduler.address
        self.address = f"tcp://{location}:{_PORT}"
        self.scheduler = self._start(
            scheduler,
            "scheduler",
            "scheduler",
            "--host",
            location,
            "--port",
            _PORT,
            "--no-dashboard",
        )
        self.workers = [
            self._start(
                *(
                    host,
                    f"worker-{number}",
                    "worker",
                    self.address,
                    "--name",
                    number,
                    "--nthreads",
                    1,
                ),
                *("--memory-limit", 0, "--no-dashboard", *arguments),
            )
            for number, host in enumerate(workers)
        ]

    def run(self, host: Host, *arguments: object, **options: Any) -> Any:
        """Start a program of Python on a host, with the cluster's environment; its output is
        read from ``stdout``.
        """
        return self._start_program(host, arguments, self.environment, None, **options)

    def log(self, name: str) -> str:
        """Return what ``scheduler`` or ``worker-N`` has printed."""
        return Path(self.folder, f"{name}.log").read_text()

    def _start(self, host: Host, name: str, *arguments: object) -> Any:
        output = Path(self.folder, f"{name}.log")
        return self._start_program(host, ("-m", "dask", *arguments), self.environment, output)
