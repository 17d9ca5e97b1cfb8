"""Servers of vLLM for tests, each a process of its own on loopback."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.clusters import lasting_port

ROOT = Path(__file__).parents[2]
ROOM = ["--max-model-len", "512", "--max-num-seqs", "64", "--enforce-eager", "--dtype", "float32"]
ROOM += ["--kv-cache-memory-bytes", str(64 << 20)]
_PATIENCE = 300.0  # on slow machines: three processes import vLLM, one after the other


class VllmServer:
    """``python -m siirl_dask.rollout.server_engine.serve FOLDER``, or with ``module`` vLLM's own."""

    def __init__(self, folder, log, *options, module="siirl_dask.rollout.server_engine.serve"):
        self.port = lasting_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", module, str(folder)]
        self._command += ["--port", str(self.port), *ROOM, *options]
        self._log = Path(log)
        self.start()

    def start(self):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}"}
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdout=self._log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self):
        """Return when it answers."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (URLError, OSError):
                time.sleep(0.2)
        raise AssertionError(self._log.read_text()[-3000:])

    def kill(self):
        """Kill all its processes at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def servers(folder, tmp_path, number=1, *options):
    """So many servers of one model, that answer."""
    started = [
        VllmServer(folder, tmp_path / f"server-{index}.log", *options) for index in range(number)
    ]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.kill()
