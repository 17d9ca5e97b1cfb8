"""A cluster that a spec describes is started, waited for and ended; what cannot be started is
refused by name.
"""

import re
import signal
import threading
import time

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler, SpecCluster, Worker
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import ProcessInterface

from siirl_dask.commands.script import main
from siirl_dask.config import ClusterConfig, Config
from siirl_dask.config.file import shipped
from siirl_dask.driver.clusters import deployment
from siirl_dask.driver.clusters.cluster import connect
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.observe import Progress

HERE = "tests.driver.test_deployment"
LOCAL = (
    "{n_workers: 0, threads_per_worker: 1, memory_limit: 0, host: 127.0.0.1, dashboard_address: "
    "'127.0.0.1:0'"
)
QUIET = Progress(1, enabled=False)
made: list[Cluster] = []


class Kept(LocalCluster):
    """Worker processes of this machine; ``made`` has all such clusters."""

    def __init__(self, **options):
        made.append(self)
        super().__init__(silence_logs=50, **options)


class Slow(Kept):
    """Starts once it is allowed to."""

    allowed = threading.Event()

    def __init__(self, **options):
        assert self.allowed.wait(60)
        super().__init__(**options)


class Breaking(Kept):
    """A cluster whose jobs are refused when they are submitted."""

    async def _correct_state_internal(self):
        self._correct_state_waiting = None
        if self.worker_spec:
            raise RuntimeError("sbatch: error: invalid partition")


class Fixed(Kept):
    """A cluster with the workers that its arguments name."""

    _supports_scaling = False


class Choosy(Cluster):
    """A cluster that is not pleased with its arguments, as those of dask-jobqueue are at times."""

    def __init__(self, **options):
        raise ValueError("you must say how\nmany cores a job has")


class NoCluster:
    pass


def by_function(size: int) -> LocalCluster:
    raise AssertionError("a check started a cluster")


@pytest.fixture(autouse=True)
def nothing_is_left():
    made.clear()
    yield
    assert [cluster.status.name for cluster in made] == ["closed"] * len(made)


@pytest.fixture
def config(write):
    """The configuration of a run on ``kind``, with further arguments of its class."""

    def config(kind, more="", **options):
        path = write(f"class: {HERE}.{kind}\nkwargs: {LOCAL}{more}}}\n", "spec.yaml")
        return Config(cluster=ClusterConfig(spec=path, **{"workers": 2, **options}))

    return config


def test_the_workers_that_are_asked_for_are_there_and_end_with_the_run(config):
    with connect(config("Kept"), QUIET) as client:
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
        processes = [nanny.process.process for nanny in made[0].workers.values()]
    assert not any(process.is_alive() for process in processes)


def test_a_worker_that_is_lost_for_good_is_started_anew(config):
    """Its host is gone, and its nanny with it."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"}),
        connect(config("Kept"), QUIET) as client,
    ):
        before = {*client.scheduler_info(n_workers=-1)["workers"]}
        lost = made[0].workers[0]
        made[0].sync(lost.close)
        deployment.start_lost(made[0], 2)
        deadline = time.monotonic() + 60
        while len(now := {*client.scheduler_info(n_workers=-1)["workers"]}) < 2 or now == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(before - now) == 1


def test_a_job_of_several_workers_is_asked_for_anew_when_all_of_them_are_lost(client_of_jobs):
    """Dask knows a job by the name of its only worker; one of two it would never ask for again."""
    client, cluster = client_of_jobs
    for worker in cluster.workers[0].members:
        cluster.sync(worker.close)
    deployment.start_lost(cluster, 4, {"0-0", "0-1"})
    wait_for_workers(client, {"0-0", "0-1", "1-0", "1-1"})
    assert cluster.started == [0, 1, 0]
    assert cluster.ended == [0]


def test_a_job_with_a_worker_that_is_left_is_not_ended(client_of_jobs):
    client, cluster = client_of_jobs
    cluster.sync(cluster.workers[0].members[0].close)
    wait_for_workers(client, {"0-1", "1-0", "1-1"})
    cluster.sync(deployment._forget, cluster, {"0-0"})
    assert cluster.ended == []


def wait_for_workers(client, names):
    deadline = time.monotonic() + 30
    while {
        *(info["name"] for info in client.scheduler_info(n_workers=-1)["workers"].values())
    } != names:
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Job(ProcessInterface):
    """Two workers, in this process, as a job of ``processes: 2`` of dask-jobqueue has them."""

    def __init__(self, scheduler, name):
        super().__init__()
        self._scheduler, self._name, self.members = scheduler, name, []

    async def start(self):
        made[0].started.append(self._name)
        for number in range(2):
            name = f"{self._name}-{number}"
            self.members.append(
                await Worker(
                    self._scheduler, name=name, nthreads=1, dashboard=False, host="127.0.0.1"
                )
            )
        await super().start()

    async def close(self):
        made[0].ended.append(self._name)
        for worker in self.members:
            await worker.close()
        await super().close()


class Jobs(SpecCluster):
    def __init__(self):
        made.append(self)
        self.started, self.ended = [], []
        scheduler = {"cls": Scheduler, "options": {"dashboard": False, "host": "127.0.0.1"}}
        super().__init__(
            scheduler=scheduler, worker={"cls": Job, "options": {}, "group": ["-0", "-1"]}
        )

    def scale(self, n=0, **others):
        return super().scale(-(-n // 2), **others)


@pytest.fixture
def client_of_jobs():
    """A cluster of two jobs of two workers each."""
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"}), Jobs() as cluster:
        cluster.scale(4)
        with Client(cluster) as client:
            wait_for_workers(client, {"0-0", "0-1", "1-0", "1-1"})
            yield client, cluster
            cluster.started, cluster.ended = [], []


def test_where_a_class_starts_no_other_worker_the_error_says_what_to_do():
    with Fixed(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        said = deployment.no_replacement("mine.yaml", cluster)
    assert (
        "the class of cluster.spec='mine.yaml' starts none in place of a lost one; start one with"
        in said
    )
    assert f"`dask worker {cluster.scheduler_address}`" in said


def test_the_cluster_is_closed_when_the_run_fails(config):
    with pytest.raises(ZeroDivisionError), connect(config("Kept"), QUIET):
        raise ZeroDivisionError
    assert len(made) == 1


def test_jobs_that_are_refused_end_the_wait_with_the_cause(config):
    began = time.monotonic()
    with pytest.raises(
        RunError, match=r"Breaking does not start: sbatch: error: invalid partition$"
    ):
        connect(config("Breaking"), QUIET).__enter__()
    assert time.monotonic() - began < 60 < config("Breaking").cluster.start_timeout


def test_too_few_workers_are_counted_with_where_to_look(config):
    said = (
        r"^0 of 2 workers came up within cluster.start_timeout=6 s: .*Fixed starts them, as many "
        r"as its kwargs name"
    )
    with pytest.raises(RunError, match=said):
        connect(config("Fixed", start_timeout=6), QUIET).__enter__()


def test_a_cluster_that_comes_up_too_late_is_closed(config, monkeypatch):
    closed = threading.Event()
    monkeypatch.setattr(deployment, "_close", lambda cluster: (cluster.close(), closed.set()))
    with pytest.raises(RunError, match=r"Slow did not start within cluster.start_timeout=0.1 s$"):
        connect(config("Slow", start_timeout=0.1), QUIET).__enter__()
    Slow.allowed.set()
    assert closed.wait(60)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "no_such_package.Cluster",
            "cannot be imported: No module named 'no_such_package'; install the package",
        ),
        (
            "distributed.SHSCluster",
            "module 'distributed' has no 'SHSCluster'; did you mean 'SSHCluster'?",
        ),
        (f"{HERE}.NoCluster", "is no cluster: expected a class of distributed.deploy.Cluster"),
        ("os.path.join", "is no cluster: expected"),
        (f"{HERE}.HERE", "is no cluster: expected"),
        (f"{HERE}.by_function", "does not take its kwargs: missing a required argument: 'size'"),
    ],
)
def test_what_is_no_cluster_is_refused_before_anything_starts(write, kind, said):
    path = write(f"class: {kind}")
    with pytest.raises(
        ConfigError,
        match=re.escape(
            f"cluster.spec={path!r}: class {kind!r} {said}".replace(
                "class 'distributed.SHSCluster' module", "class 'distributed.SHSCluster': module"
            )
        ),
    ):
        deployment.check_spec(path)


def test_ctrl_c_ends_a_run_as_before_whatever_a_package_sets_when_it_is_imported(
    write, monkeypatch, tmp_path
):
    (tmp_path / "sets_a_handler.py").write_text(
        "import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\nfrom distributed import "
        "LocalCluster\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    deployment.check_spec(write("class: sets_a_handler.LocalCluster"))
    assert signal.getsignal(signal.SIGINT) is before


def test_an_unknown_argument_is_refused_with_the_nearest_one(write):
    path = write(f"class: {HERE}.by_function\nkwargs: {{sise: 3}}")
    with pytest.raises(ConfigError, match=r"does not take its kwargs: .*; did you mean 'size'\?"):
        deployment.check_spec(path)


def test_arguments_that_the_class_itself_refuses_are_a_mistake_of_the_user(config):
    with pytest.raises(
        ConfigError, match=r"Choosy refuses its kwargs: you must say how many cores a job has$"
    ):
        connect(config("Choosy"), QUIET).__enter__()


def test_a_script_and_a_plan_refuse_a_spec_before_anything_starts(write, capsys):
    from siirl_dask import grpo
    from siirl_dask.cli import main as cli

    path = write("class: nowhere.Cluster")
    for command in (
        lambda: main(grpo, arguments=[str(shipped("quickstart.yaml")), "--cluster", path]),
        lambda: cli(["run", str(shipped("quickstart.yaml")), "--cluster", path]),
        lambda: cli(["plan", str(shipped("quickstart.yaml")), "--cluster", path]),
        lambda: cli(["quickstart", f"cluster.spec={path}"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            command()
        assert (
            f"error: cluster.spec={path!r}: class 'nowhere.Cluster' cannot be imported"
            in capsys.readouterr().err
        )
