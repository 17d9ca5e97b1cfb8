"""A driver, a scheduler, a worker or all of them killed or stopped at each boundary of two links of
a step.

What is left must be told within seconds and by name, and leave nothing: no process, no role in a
worker that goes on, no file in /dev/shm. With ``-s`` each case prints a line of
docs/benchmarks/faults.md.
"""

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from siirl_dask.config.file import shipped
from tests.clusters import announced_address
from tests.conftest import digits_overrides
from tests.e2e.traps import FILE, FINISH, PLACES, SAVE, START, Order, start_workers
from tests.forked_programs import ForkedProgram

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
VICTIMS = ("driver", "scheduler", "this worker", "other worker")
SAMPLE = ("driver", signal.SIGSTOP, "update")  # in make test
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
# case of the sweep that is in the slow tests: it divides neither the number of signals nor of
# places
EVERY = 17
ALL = [(victim, sign, place) for victim in VICTIMS for sign in SIGNALS for place in PLACES]
CASES = [
    pytest.param(*case, marks=() if case == SAMPLE else SWEEP if number % EVERY else SLOW)
    for number, case in enumerate(ALL)
]
SCHEDULER = "from distributed.cli.dask_scheduler import main; main()"
QUIET = ["--no-dashboard", "--host", "127.0.0.1", "--port", "0"]
# seconds; a worker that stands still while it builds a role is noticed by nothing else
START_TIMEOUT = 20
SAID = {
    (
        "scheduler",
        signal.SIGKILL,
    ): r"the scheduler at tcp://\S+ has ended: its port refuses connections",
    ("scheduler", signal.SIGSTOP): r"no sign of life of the scheduler at tcp://\S+ within 8 s",
    (
        "worker",
        signal.SIGKILL,
    ): r"worker '[01]' at tcp://\S+ left the cluster during|the peer is gone",
    (
        "worker",
        signal.SIGSTOP,
    ): r"worker '[01]'.*no sign of life within 5 s|nothing got done within 20 s",
}


class Run:
    """A run with traps on a cluster of two workers, all in processes of this test's."""

    def __init__(self, folder, task, *overrides):
        self.order, self.said, self._file = folder / "order", [], folder / "scheduler.json"
        words = ["-c", SCHEDULER, "--scheduler-file", self._file, *QUIET]
        self.scheduler = ForkedProgram(words, None, folder / "scheduler.log", alone=True)
        address = announced_address(self._file, self.scheduler)
        self.workers = start_workers(address, 2)
        given = [*digits_overrides(task, folder / "run"), *overrides, f"cluster.address={address}"]
        given += [
            "cluster.workers=2",
            "cluster.placement={}",
            "rewards.processes=1",
            "checkpoint.every=1",
        ]
        given += ["run.max_restarts=0", "run.grace=0"]
        self.driver = ForkedProgram(
            ["-m", "tests.e2e.traps", shipped("quickstart.yaml"), *given],
            {**os.environ, FILE: str(self.order)},
            folder / "stdout",
            folder / "stderr",
            alone=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        self.said.extend((time.time(), line.rstrip()) for line in self.driver.stderr)

    def spring(self, victim, sign, place):
        """Give the order, wait until it is carried out, and return the time of that."""
        pids = {
            "driver": [self.driver.pid],
            "scheduler": [self.scheduler.pid],
            "this worker": [],
            "other worker": [self.workers[1].pid],
            "all": [self.driver.pid, self.scheduler.pid, self.workers[1].pid],
        }
        step = {START: 0, FINISH: 3}.get(place, 2)
        itself = victim in ("this worker", "all")
        Order(place, step, int(sign), tuple(pids[victim]), itself).give(self.order)
        at, deadline = self.order.with_suffix(".at"), time.monotonic() + 120
        while not at.exists() or not at.read_text():
            assert time.monotonic() < deadline, self.said
            assert self.driver.poll() is None, self.said
            self._note()
            time.sleep(0.02)
        self._note()
        return float(at.read_text())

    def _note(self):
        """Note the processes below the workers and the driver, and the files in memory that all
        of them have open.
        """
        self.family, self.files = [], set()
        for pid in (self.driver.pid, self.scheduler.pid, *(worker.pid for worker in self.workers)):
            with suppress(psutil.NoSuchProcess, OSError):
                children = psutil.Process(pid).children(recursive=True)
                self.family += children
                for process in (pid, *(child.pid for child in children)):
                    maps = Path(f"/proc/{process}/maps").read_text()
                    self.files |= {
                        line for line in re.findall(r"/dev/shm/.*", maps) if "(deleted)" not in line
                    }

    def closed(self):
        """Ranks of the workers whose roles were closed."""
        return {int(path.name[-1]) for path in self.order.parent.glob("order.closed-*")}

    def end(self):
        processes = [
            psutil.Process(p.pid) for p in (self.driver, self.scheduler) if p.poll() is None
        ]
        for process in (*processes, *self.workers):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.driver.wait()
        self.scheduler.wait()
        for worker in self.workers:
            worker.join()
        self._reader.join()


@pytest.fixture
def trapped(digits_task, tmp_path):
    runs = []

    def start(*overrides):
        runs.append(Run(tmp_path, digits_task, *overrides))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def until(reached, seconds):
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.05)
    return reached()


def seconds_until_freed(run, survivors, sprung, slowdown):
    """Every worker that goes on has closed its roles, and what it started has ended."""
    assert until(lambda: run.closed() >= survivors, 60), f"closed only {run.closed()}: {run.said}"
    freed = time.time() - sprung
    rewards = [child for child in run.family if child.is_running()]
    _, alive = psutil.wait_procs(rewards, timeout=10 * slowdown.factor)
    frozen = {run.workers[rank].pid for rank in {0, 1} - survivors}
    left = [child for child in alive if not frozen & {child.ppid(), child.pid}]
    assert not left, f"left over: {left}"
    return freed


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "sign", "place"), CASES)
def test_one_that_is_killed_or_stopped_is_named_and_all_others_free_what_they_hold(
    trapped, slowdown, victim, sign, place
):
    steps = 3 if place == FINISH else 100000
    run = trapped(f"run.steps={steps}", f"cluster.start_timeout={START_TIMEOUT}")
    sprung = run.spring(victim, sign, place)
    survivors = {0, 1} - {"this worker": {0}, "other worker": {1}}.get(victim, set())
    message, told, ended = "", 0.0, 0.0
    if victim != "driver":
        run.driver.wait(90)
        ended = time.time() - sprung
        run._reader.join()
        errors = [(at, line) for at, line in run.said if line.startswith("error: ")]
        if place != FINISH or run.driver.returncode:  # the last word may have come before it
            assert errors, run.said
            told, message = errors[0][0] - sprung, errors[0][1]
            assert re.search(SAID[victim.split()[-1], sign], message), message
            bound = START_TIMEOUT + 5 if place == START and "worker" in victim else 10
            assert told < bound * slowdown.factor, message
            assert ended < told + 30 * slowdown.factor
        assert not any("Traceback" in line for _, line in run.said), run.said
    freed = seconds_until_freed(run, survivors, sprung, slowdown)
    if victim == "driver":
        assert freed < 15 * slowdown.factor
    print(
        f"| {victim} | {sign.name} | {place} | {told:.1f} | {ended:.1f} | {freed:.1f} | "
        f"`{message[7:110]}` |"
    )


@pytest.mark.slow
def test_a_driver_that_stood_still_and_goes_on_says_that_it_was_given_up(trapped):
    run = trapped("run.steps=100000")
    run.spring("driver", signal.SIGSTOP, "update")
    assert until(lambda: run.closed() == {0, 1}, 60)
    run.driver.send_signal(signal.SIGCONT)
    assert run.driver.wait(30) == 1
    run._reader.join()
    assert any("error: the driver gave no sign of life" in line for _, line in run.said), run.said
    assert not any("Traceback" in line for _, line in run.said), run.said


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=() if p == "update" else SLOW) for p in ("update", SAVE)]
)
def test_of_a_whole_group_that_is_killed_at_once_nothing_is_left(trapped, slowdown, place):
    run = trapped("run.steps=100000")
    run.spring("all", signal.SIGKILL, place)
    _, alive = psutil.wait_procs(run.family, timeout=5 * slowdown.factor)
    assert not alive
    left = [name for name in run.files if Path(name).exists()]
    assert not left


@pytest.mark.slow
def test_a_run_on_a_cluster_of_its_own_leaves_no_semaphore_after_kill_9(start):
    run = start("run.steps=100000")
    run.wait_for_steps(1)
    pids = [run.process.pid, *(child.pid for child in run.family)]
    names = {
        name
        for pid in pids
        for name in re.findall(r"/dev/shm/.*", Path(f"/proc/{pid}/maps").read_text())
    }
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert names
    assert not [name for name in names if Path(name).exists()]
