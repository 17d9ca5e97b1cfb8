import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.worker.process.fork_server import START_METHOD
from tests.conftest import digits_overrides
from tests.forked_programs import ForkedProgram
from tests.slowdown import Slowdown

# in the environment of all processes of a run, whenever they were started
MARK = "SIIRL_TESTED_RUN"


@dataclass
class Started:
    """``siirl-dask run`` as a user starts it: a process group of its own, as a terminal gives
    one.
    """

    process: subprocess.Popen | ForkedProgram
    url: Path
    mark: str | None  # none for one whose keeper knows all that it has started
    family: list = field(default_factory=list)
    shared_memory: set = field(default_factory=set)
    slowdown: float = 1.0  # what bounds of seconds are multiplied by: see tests/slowdown.py

    def steps(self):
        log = self.url / "metrics.jsonl"
        return log.read_text().count('"phase": "train"') if log.exists() else 0

    def wait_for_steps(self, count):
        self.wait_until(lambda: self.steps() >= count)

    def wait_until(self, reached, timeout=90):
        """Return when ``reached()`` is true; fail when the run ends or ``timeout`` seconds pass
        before.
        """
        deadline = time.monotonic() + timeout
        while not reached():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{self.steps()} steps after {timeout} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        for process in self.family:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self.shared_memory |= {
                    name for name in re.findall(r"/dev/shm/.*", maps) if "(deleted)" not in name
                }

    def processes(self):
        """All processes of the run that are there, also those that left its group and its
        session.
        """
        found = []
        if self.mark is None:
            return found
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def workers(self):
        """Forked from one child, which names them as it is named; or by Dask, where setproctitle
        is installed.
        """
        commands = {
            child: " ".join(child.cmdline())
            for child in self.family
            if child.ppid() != self.process.pid
        }
        return [
            child
            for child, text in commands.items()
            if "forkserver" in text or "dask worker" in text
        ]

    def end(self, timeout):
        """Seconds until it ended, and what it printed; whatever of it is still there fails the
        test.
        """
        began = time.monotonic()
        try:
            with Slowdown() as measured:
                out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler prints where every thread is
            pytest.fail(f"still running after {timeout} s:\n{self.process.communicate()[1]}")
        seconds = time.monotonic() - began
        self.slowdown = measured.factor
        _, alive = psutil.wait_procs({*self.family, *self.processes()}, timeout=3 * self.slowdown)
        assert not alive, f"left over: {alive}"
        if isinstance(self.process, ForkedProgram):
            assert self.process.left_over() == []
        left = [name for name in self.shared_memory if Path(name).exists()]
        assert not left, f"left over: {left}"
        return seconds, out, err


def _hear_interrupts():
    """Shells start background jobs, and so perhaps these tests, with SIGINT ignored; a terminal
    does not.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(digits_task, tmp_path, request):
    """Start a run on a cluster of its own: by an interpreter of its own in tests that hold
    times, else forked.
    """
    started = []
    interpreter = (
        START_METHOD != "forkserver" or request.node.get_closest_marker("alone") is not None
    )

    def begin(*overrides, config=None):
        url = tmp_path / "run"
        words = ["-m", "siirl_dask.cli", "run", str(config or shipped("quickstart.yaml"))]
        words += [*digits_overrides(digits_task, url), *overrides]
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        mark = None
        if interpreter:
            mark = uuid4().hex
            process = subprocess.Popen(
                [sys.executable, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
                env={**environment, MARK: mark},
            )
        else:
            output, errors = (tmp_path / f"{name}-{len(started)}" for name in ("stdout", "stderr"))
            process = ForkedProgram(words, environment, output, errors)
        started.append(process)
        return Started(process, url, mark)

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
