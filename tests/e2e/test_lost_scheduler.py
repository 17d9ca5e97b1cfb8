"""A scheduler that is started again at its place, with workers, gets the run back."""

import pytest

from siirl_dask.driver import launch_loop
from siirl_dask.driver.recovery.replacement import FixedWorkers
from siirl_dask.errors import SchedulerLost, WorkerLost
from tests.clusters import announced_address, lasting_port
from tests.e2e.test_elastic import Gates, begin, seen, wait_for_try  # noqa: F401
from tests.e2e.test_resume import check_same
from tests.e2e.traps import start_workers
from tests.forked_programs import ForkedProgram

pytestmark = pytest.mark.slow
SCHEDULER = "from distributed.cli.dask_scheduler import main; main()"
QUIET = ["--no-dashboard", "--host", "127.0.0.1"]
STEPS = ["run.steps=5", "cluster.workers=2"]


class Cluster:
    """A scheduler process with a scheduler file, and two workers without nannies."""

    def __init__(self, folder, port):
        self.file = folder / "scheduler.json"
        self.file.unlink(missing_ok=True)
        words = ["-c", SCHEDULER, "--scheduler-file", self.file, "--port", port, *QUIET]
        self.scheduler = ForkedProgram(words, None, folder / "scheduler.log", alone=True)
        self.address = announced_address(self.file, self.scheduler)
        self.workers = start_workers(self.address, 2)

    def lose(self):
        self.scheduler.kill()
        self.scheduler.wait()

    def end(self):
        self.lose()
        for worker in self.workers:
            worker.kill()


@pytest.fixture
def clusters(tmp_path):
    made = []

    def make(port=None):
        made.append(Cluster(tmp_path, lasting_port() if port is None else port))
        return made[-1]

    yield make
    for cluster in made:
        cluster.end()


def test_a_run_goes_on_when_its_scheduler_is_started_again(begin, seen, clusters):  # noqa: F811
    first, gates = clusters(), Gates(seen)
    straight = begin("straight", first.address, *STEPS)
    (seen / "generated").unlink()

    def start_again():
        first.lose()
        clusters(first.address.rpartition(":")[2])

    gates.at(3, start_again)
    changed = begin("changed", first.address, *STEPS)
    gates.check()
    check_same(straight, changed, tolerance=1e-5, steps=5)
    (restart,) = changed.summary.restarts
    print(f"{restart.cause[:90]} | {restart.seconds:.1f} s, {restart.steps_again} steps again")
    assert f"the scheduler at {first.address} has ended" in restart.cause
    generated = (seen / "generated").read_text().split()
    assert [generated.count(str(step)) for step in (1, 2, 4, 5)] == [2] * 4, "generated again"
    for worker in first.workers:
        worker.join(30)
        assert not worker.is_alive(), "a worker of the lost scheduler stayed"


@pytest.fixture
def dying(monkeypatch):
    """Have something done while the run looks for workers after it has lost one."""

    def at_search(do):
        class Dying(FixedWorkers):
            def find(self, client, group, failure, plugin):
                if isinstance(failure, WorkerLost):
                    do()
                return super().find(client, group, failure, plugin)

        monkeypatch.setattr(launch_loop, "FixedWorkers", Dying)

    return at_search


def test_one_that_dies_while_a_restart_is_prepared_is_waited_for(
    begin,  # noqa: F811
    seen,  # noqa: F811
    clusters,
    dying,
    tmp_path,
):
    first, gates = clusters(), Gates(seen)
    straight = begin("straight", first.address, *STEPS)

    def start_another():
        wait_for_try(tmp_path / "changed", 3)
        clusters(first.address.rpartition(":")[2])

    gates.at(3, lambda: (first.workers[1].kill(), start_another()))
    dying(first.lose)
    changed = begin("changed", first.address, *STEPS)
    gates.check()
    check_same(straight, changed, tolerance=1e-5, steps=5)
    (restart,) = changed.summary.restarts
    print(f"{restart.cause[:90]} | {restart.seconds:.1f} s, {restart.steps_again} steps again")
    assert restart.cause.startswith("worker '1'")


def test_where_none_comes_after_that_the_run_ends_with_what_happened(
    begin,  # noqa: F811
    seen,  # noqa: F811
    clusters,
    dying,
    capfd,
):
    first, gates = clusters(), Gates(seen)
    gates.at(2, first.workers[1].kill)
    dying(first.lose)
    with pytest.raises(
        WorkerLost, match=r"worker '1' at \S+ left the cluster during train step [12]"
    ) as raised:
        begin("run", first.address, *STEPS, "cluster.scheduler_timeout=1")
    (note,) = raised.value.__notes__
    assert "the scheduler was lost, and none came to its place" in note
    assert "Traceback" not in capfd.readouterr().err


def test_where_no_scheduler_comes_the_run_ends_with_what_happened(begin, seen, clusters, capfd):  # noqa: F811
    first, gates = clusters(), Gates(seen)
    gates.at(2, first.lose)
    with pytest.raises(SchedulerLost, match=r"train step [12]: the scheduler at") as raised:
        begin("run", first.address, *STEPS, "cluster.scheduler_timeout=1")
    (note,) = raised.value.__notes__
    assert "none came to its place" in note
    assert "cluster.scheduler_timeout=1 s" in note
    assert "Traceback" not in capfd.readouterr().err
