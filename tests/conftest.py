"""Fixtures that several folders share: a tiny task, a cluster of processes that outlives single
tests, and a run on it.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings

from siirl_dask.config import Config
from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.models.broken_imports import hide
from tests.reports import UNTIL, NoProcesses, Until, skipped_lines
from tests.settings import digits_overrides
from tests.slowdown import Slowdown

hide()  # before any test module imports transformers
# until all is imported: a tenth to a quarter of the seconds that takes, mostly of vLLM's
gc.disable()
# nanobind, which triton and duckdb are built with, reports what stays frozen as leaked; and Python
# looks for garbage once less where it does not collect at its end
atexit.register(gc.unfreeze)
atexit.register(gc.disable)
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")

ROOT = Path(__file__).parent
FEWER_EXAMPLES = 20
"""Examples of a property without processes, where a test does not say how many; make test takes
100."""
SLOWEST = ("rollout", "e2e", "training")


def pytest_collection_modifyitems(config, items):
    """The slowest files begin first, so that no process is left alone with one. (pytest forgets the
    order in which folders within one another are given.) Files that are named one by one run in
    that order.
    """
    if any(argument.partition("::")[0].endswith(".py") for argument in config.args):
        return
    folders = {path: path.relative_to(ROOT).parts[0] for path in {item.path for item in items}}
    places = {
        path: SLOWEST.index(folder) if folder in SLOWEST else len(SLOWEST)
        for path, folder in folders.items()
    }
    items.sort(key=lambda item: places[item.path])


def pytest_addoption(parser):
    parser.addoption(
        "--no-processes",
        action="store_true",
        help="skip tests that start a process or import an engine's package",
    )


def pytest_configure(config):
    if config.option.reportchars == "a":
        config.option.reportchars = "fExX"  # skipped tests have lines of their own, by reason
    if UNTIL in os.environ:
        try:
            end = float(os.environ[UNTIL])
        except ValueError:
            raise pytest.UsageError(
                f"{UNTIL}={os.environ[UNTIL]!r} is not a number of seconds since 1970"
            ) from None
        config.pluginmanager.register(Until(end))
    if config.getoption("no_processes"):
        config.pluginmanager.register(NoProcesses())
        settings.register_profile(
            "no processes", settings.get_profile("shared machine"), max_examples=FEWER_EXAMPLES
        )
        settings.load_profile("no processes")


def pytest_terminal_summary(terminalreporter):
    lines = skipped_lines(terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section(
            f"{len(terminalreporter.stats['skipped'])} skipped, and why", yellow=True
        )
        for line in lines:
            terminalreporter.write_line(line)


def pytest_collection_finish():
    # nothing of what has been imported and collected is garbage, and the next collection would look
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Garbage is looked for often, by Python, by vLLM and by tests: a second each time, where it
    goes through all that modules and tests before have left.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def slowdown():
    """Measures this machine while the test runs: see tests/slowdown.py."""
    with Slowdown() as measured:
        yield measured


@pytest.fixture(scope="session")
def digits_task(tmp_path_factory):
    """A random model of 91k parameters and prompts that ask for digits: learns without a warm
    start.
    """
    from siirl_dask.tasks.sorting import write_digits_task

    return write_digits_task(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def quickstarts_task(tmp_path_factory):
    """A folder ``runs`` with what the quickstart prepares, for copies of it: its model has
    learned little.
    """
    from siirl_dask.tasks.sorting import write_sorting_task

    runs = tmp_path_factory.mktemp("quickstart") / "runs"
    write_sorting_task(runs / "sorting-0", accuracy=0.0)
    return runs


S3_SERVER = """
import logging, sys, threading
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
put_object, one_at_a_time = S3Response.put_object, threading.Lock()
def put(self):
    with one_at_a_time:
        return put_object(self)
S3Response.put_object = put
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
"""In a process of its own, which ends with its standard input: vLLM cannot start in one that has
imported Flask.

moto looks for a conditional PUT's object, and writes it later: on a busy machine two writers of one
both succeed, where S3 lets one alone do so.
"""


@dataclass
class Finished:
    url: Path
    summary: object

    def table(self, name, step):
        return pq.read_table(self.url / name / f"step={step:06d}").sort_by("row_id")

    def records(self, phase="train"):
        lines = (self.url / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["phase"] == phase]


@pytest.fixture(scope="session")
def s3():
    """A bucket of an S3 API on loopback, which processes that are started from here on reach as
    well.
    """
    import s3fs

    command = [sys.executable, "-c", S3_SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        assert port, "moto's server did not start"
        with pytest.MonkeyPatch.context() as environment:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                environment.setenv(name, "test")
            environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
            environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            s3fs.S3FileSystem().mkdir("tests")
            yield "s3://tests"
            s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["local", "memory", "s3"])
def store_url(request, tmp_path):
    """An empty URL on each kind of store."""
    match request.param:
        case "local":
            return str(tmp_path / "store")
        case "memory":
            return f"memory://tests/{uuid4().hex}"
    return f"{request.getfixturevalue('s3')}/{uuid4().hex}"


@pytest.fixture(scope="session")
def shared_cluster():
    """Four worker processes on this machine."""
    from tests.clusters import beat_seldom_when_idle, local_cluster

    with local_cluster(4) as cluster:
        beat_seldom_when_idle(cluster.scheduler)
        yield cluster


@pytest.fixture
def cluster_address(shared_cluster):
    """Address of the shared cluster, for tests that can live with used workers and leave them
    alive.
    """
    before = {name: nanny.pid for name, nanny in shared_cluster.workers.items()}
    yield shared_cluster.scheduler_address
    after = {name: nanny.pid for name, nanny in shared_cluster.workers.items()}
    assert after == before, "a worker of the shared cluster died and was started again"


@pytest.fixture
def train(digits_task, cluster_address, tmp_path):
    """Run the digits task on the shared cluster: ``train("name", "key=value", ..., dag=of_config,
    change=of_dag)``, and ``fresh=True`` or ``force=True`` where there is a run.
    """
    from siirl_dask.driver.phases import dags
    from siirl_dask.driver.run import run

    def start(name, *overrides, dag=None, config_file=None, change=lambda dag: dag, **how):
        url = tmp_path / name
        given = [
            *digits_overrides(digits_task, url),
            f"cluster.address={cluster_address}",
            *overrides,
        ]
        file = load_config_file(config_file or shipped("quickstart.yaml"), given)
        own, validation = dags(file)
        return Finished(
            url, run(file.config, change(dag(file.config) if dag else own), validation, **how)
        )

    return start


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file and be in its folder; gives its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return write


@pytest.fixture
def digits_config(digits_task, tmp_path) -> Config:
    return load(shipped("quickstart.yaml"), digits_overrides(digits_task, tmp_path / "run"))
