"""A run whose driver, scheduler or workers are killed at each boundary of two links goes on, and
ends as a run that nobody has disturbed. Nothing that was committed is generated again.

Workers and schedulers that are killed are started anew at once, and so is the driver, with the same
command. What engines are asked for is counted outside of the processes. With ``-s`` it prints the
table of docs/benchmarks/faults.md.
"""

import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.observe import read_summary
from tests.clusters import lasting_port
from tests.conftest import Finished, digits_overrides
from tests.e2e.test_resume import check_same
from tests.e2e.traps import (
    FINISH,
    PLACES,
    START,
    Order,
    start_driver,
    start_scheduler,
    start_workers,
)

STEPS, AT = (
    5,
    4,
    # steps of a run, and the one in which it is disturbed: a step was stored since the last
    # checkpoint
)
DRIVER, SCHEDULER, ONE, ALL, EVERYTHING = (
    "driver",
    "scheduler",
    "one worker",
    "all workers",
    "everything at once",
)
WHO = {1: (DRIVER, SCHEDULER, ONE, EVERYTHING), 2: (DRIVER, SCHEDULER, ONE, ALL, EVERYTHING)}
"""Processes that are killed together, by the number of workers."""
SAMPLE = [(2, ALL, "update")]
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
CASES = [
    pytest.param(*case, marks=SLOW if case in SAMPLE else SWEEP)
    for case in (
        (size, who, place) for size, whom in WHO.items() for who in whom for place in PLACES
    )
]
HEADER = (
    "killed, of so many workers | noticed after, s | there again after, s | requests again | for "
    "committed rows"
)


class Group:
    """A scheduler, workers and a driver, all of them processes, and what can be seen of their
    run from outside.
    """

    def __init__(self, folder, task, size):
        self.url, self.order, self._said, self._size = (
            folder / "run",
            folder / "order",
            folder / "said",
            size,
        )
        port = lasting_port()
        self._port, self._address = port, f"tcp://127.0.0.1:{port}"
        given = [
            f"cluster.address={self._address}",
            f"cluster.workers={size}",
            "cluster.placement={}",
        ]
        given += [
            f"run.steps={STEPS}",
            "checkpoint.every=2",
            "rewards.processes=1",
            "observe.progress=true",
        ]
        self._command = [str(shipped("quickstart.yaml")), *digits_overrides(task, self.url), *given]
        self._started, self.committed, self._noticed = [], {}, None
        self._freed, self._told_by_workers, self._names = None, False, 0
        self.scheduler, self.workers = start_scheduler(port), self._start_workers(size)
        self._start_driver()

    def _start_workers(self, count):
        self._names += count
        workers = start_workers(self._address, count, first=self._names - count)
        self._started += workers
        return workers

    def _start_driver(self):
        self.driver = start_driver(str(self.order), str(self._said), self._command)

    def kill(self, who, place):
        """Kill whom, at the place, and wait until they are dead."""
        whom = {
            DRIVER: [self.driver],
            SCHEDULER: [self.scheduler],
            ONE: self.workers[:1],
            ALL: self.workers,
            EVERYTHING: [self.driver, self.scheduler, *self.workers],
        }[who]
        # at the end roles are freed in any case
        self._told_by_workers = who == DRIVER and place != FINISH
        first = self.workers[0]  # which carries out the order
        step = {START: 0, FINISH: STEPS}.get(place, AT)
        pids = tuple(process.pid for process in whom if process is not first)
        Order(place, step, int(signal.SIGKILL), pids, first in whom).give(self.order)
        self.wait(
            lambda: self.order.with_suffix(".at").exists(),
            self.driver if DRIVER not in whom else None,
        )
        for process in whom:
            process.join(60)
            assert not process.is_alive()

    def start_again(self, who):
        """Start whatever was killed, or ends with what was killed."""
        if who in (SCHEDULER, EVERYTHING):
            self.scheduler.join(10)
            self.scheduler = start_scheduler(self._port)
        self._start_workers({DRIVER: 0, ONE: 1}.get(who, self._size))
        if who in (DRIVER, EVERYTHING):
            self._start_driver()

    def wait(self, reached, running=None):
        """Look at the run until ``reached()`` is true; the process ``running`` must not end
        before.
        """
        deadline = time.monotonic() + 120
        while not reached():
            assert time.monotonic() < deadline, self.said()
            assert running is None or running.is_alive(), self.said()
            self._look()
            time.sleep(0.01)
        self._look()

    def _look(self):
        """Note which steps have committed rows, and since when, and when somebody noticed that
        another was gone.
        """
        with suppress(FileNotFoundError):  # stages go while one looks
            for record in self.url.glob("*/**/step=*/_parts-*.json"):
                step, since = int(record.parent.name.removeprefix("step=")), record.stat().st_mtime
                self.committed[step] = min(since, self.committed.get(step, since))
        if self._noticed is None and re.search(r"^restart 1 of ", self.said(), re.MULTILINE):
            self._noticed = time.time()
        if self._freed is None and self._told_by_workers and self.order.with_suffix(".at").exists():
            at = self.order.with_suffix(".at").stat().st_mtime
            freed = [path.stat().st_mtime for path in self.order.parent.glob("order.closed-*")]
            self._freed = min((mtime for mtime in freed if mtime > at), default=None)

    def said(self):
        return self._said.read_text() if self._said.exists() else ""

    def seconds(self):
        """Seconds from the kill until the driver, or without one a worker, noticed, and until
        the run was back.
        """
        at = float(self.order.with_suffix(".at").read_text())
        again = self.order.with_suffix(".again")
        noticed = self._noticed or self._freed
        back = float(again.read_text()) if again.exists() else time.time()
        return noticed and noticed - at, back - at

    def requests(self):
        """Time and seed of each request that an engine took."""
        lines = Path(f"{self.order}.calls").read_text().splitlines()
        return [(float(at), int(seed)) for at, seed in map(str.split, lines)]

    def finished(self):
        return Finished(self.url, read_summary(str(self.url)))

    def end(self):
        for process in (self.driver, self.scheduler, *self._started):
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def group(digits_task, tmp_path_factory):
    """Start a group of so many workers, and end it when the next one starts."""
    groups = []

    def begin(size):
        while groups:
            groups.pop().end()
        groups.append(Group(tmp_path_factory.mktemp("recovery"), digits_task, size))
        return groups[-1]

    yield begin
    while groups:
        groups.pop().end()


@pytest.fixture(scope="module")
def straight(group):
    """The run that nobody disturbs, by its number of workers."""
    known = {}

    def run(size):
        if size not in known:
            undisturbed = group(size)
            undisturbed.wait(lambda: not undisturbed.driver.is_alive())
            assert undisturbed.driver.exitcode == 0, undisturbed.said()
            known[size] = undisturbed.finished()
            requests, seeds = undisturbed.requests(), seeds_of(undisturbed.url)
            assert sorted(seed for _, seed in requests) == sorted(seeds), (
                "the count misses requests, or has too many"
            )
        return known[size]

    return run


def seeds_of(url):
    """Step of each row's seed."""
    steps = range(1, STEPS + 1)
    tables = {
        step: pq.read_table(url / "rollouts" / f"step={step:06d}", columns=["sampling_seed"])
        for step in steps
    }
    return {
        seed: step for step, table in tables.items() for seed in table["sampling_seed"].to_pylist()
    }


@pytest.fixture(scope="module")
def figures():
    """Figures of each case, by the number of workers and who was killed, then by place; printed
    at the end.
    """
    found = {}
    yield found
    print("", *tables(found), sep="\n")


def tables(found):
    """Lines of two tables: of all places together, and of each place the seconds to notice, and
    those until there.
    """
    columns = {f"{who}, {size}": by_place for (size, who), by_place in found.items()}
    yield f"| {HEADER} |"
    for name, by_place in columns.items():
        noticed, back, again, committed = zip(*by_place.values(), strict=True)
        spans = (
            span([seconds for seconds in some if seconds is not None]) for some in (noticed, back)
        )
        yield f"| {name} | {' | '.join(spans)} | {min(again)} to {max(again)} | {sum(committed)} |"
    yield ""
    yield f"| killed at | {' | '.join(columns)} |"
    for place in PLACES:
        of_place = [by_place.get(place) for by_place in columns.values()]
        cells = ("" if one is None else f"{shown(one[0])} / {shown(one[1])}" for one in of_place)
        yield f"| {place} | {' | '.join(cells)} |"


def span(seconds):
    return f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "-"


def shown(seconds):
    return "-" if seconds is None else f"{seconds:.1f}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "who", "place"), CASES)
def test_whoever_is_killed_wherever_it_goes_on_and_generates_nothing_again(
    group, straight, figures, size, who, place
):
    expected = straight(size)
    run = group(size)
    run.kill(who, place)
    run.start_again(who)
    run.wait(lambda: not run.driver.is_alive())
    assert run.driver.exitcode == 0, run.said()
    assert "Traceback" not in run.said(), run.said()
    noticed, back = run.seconds()
    requests, steps = run.requests(), seeds_of(run.url)
    committed = [seed for at, seed in requests if at > run.committed[steps[seed]]]
    again = len(requests) - len(steps)
    print(
        f"| {who}, {size} | {place} | {shown(noticed)} | {shown(back)} | {again} | "
        f"{len(committed)} |"
    )
    figures.setdefault((size, who), {})[place] = (noticed, back, again, len(committed))
    assert not committed, f"{len(committed)} committed rows were generated again"
    check_same(expected, run.finished(), tolerance=0.0 if size == 1 else 1e-5, steps=STEPS)
