"""A run of three steps whose store fails at one operation: before it is done, after it, or with the
process killed.

Its rows, metrics and checkpoints equal those of a run on a store that never fails.
"""

import json
import multiprocessing

import pyarrow.parquet as pq
import pytest
from distributed import Client, WorkerPlugin
from siirl_storage import open_fs
from siirl_storage.faults import FaultPlan, How, inject

from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.runs.checkpoints import checkpoint_url, committed
from siirl_dask.training.files.checkpoint import read_model
from siirl_dask.worker.process.fork_server import START_METHOD
from tests.clusters import local_cluster
from tests.conftest import digits_overrides

EXACT = ["row_id", "prompt", "response_ids", "reward", "weights_version", "advantage"]
LEARNED = ["policy/loss", "policy/grad_norm", "reward/mean", "data/drawn_prompts"]
# a thread writes a sign of life every few seconds, at no place of its own among the operations
BEAT = ".beat"
READS = ("info", "ls", "find", "glob", "cat_file")
FAILURES, DEATHS = (How.BEFORE, How.AFTER), (How.KILL_BEFORE, How.KILL_AFTER)
HOWS = (*FAILURES, *DEATHS)


def command(plan, arguments):
    """Be a process that runs ``siirl-dask`` on a store with failures."""
    inject(plan)
    main(arguments)


class Injects(WorkerPlugin):
    """Makes ``faulty://`` known in a worker, also in one that is started again."""

    name = "injects"

    def __init__(self, plan):
        self.plan = plan

    def setup(self, worker):
        inject(self.plan)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    plan = FaultPlan(str(tmp_path_factory.mktemp("plan") / "plan.json"))
    plan.set()
    inject(plan.file)
    return plan


@pytest.fixture(scope="module")
def workers(plan):
    """One worker: its runs are equal to the last bit."""
    with local_cluster(1) as cluster, Client(cluster) as client:
        client.register_plugin(Injects(plan.file))
        yield cluster


class Sweep:
    """Starts the run at a new place each time."""

    def __init__(self, plan, task, address, folder):
        self.plan, self.task, self.address, self.folder, self.count = plan, task, address, folder, 0

    def place(self):
        self.count += 1
        return f"faulty://{self.folder}/run-{self.count}"

    def arguments(self, url, *overrides):
        given = [
            "checkpoint.every=1",
            "checkpoint.keep=1",
            "cluster.workers=1",
            "cluster.placement={}",
        ]
        given.append("observe.plot=true")
        # a thread writes it, at no place of its own among the operations
        given.append("observe.trace=false")
        address = f"cluster.address={self.address}"
        return [
            "run",
            str(shipped("quickstart.yaml")),
            *digits_overrides(self.task, url),
            *given,
            address,
            *overrides,
        ]

    def run(self, url, *overrides):
        """Start the command in this process; it must succeed."""
        main(self.arguments(url, *overrides))

    def run_elsewhere(self, url):
        """Start the command in a process of its own, which may be killed, and return its exit
        code.
        """
        arguments = (self.plan.file, self.arguments(url))
        process = multiprocessing.get_context(START_METHOD).Process(target=command, args=arguments)
        process.start()  # forked from one that has imported all: a tenth of the seconds
        process.join(120)
        assert process.exitcode is not None, "the run neither ends nor fails after 120 s"
        return process.exitcode


def outcome(url):
    """Return what a run leaves that must not depend on the store: rows, metrics, the
    checkpoint's weights.
    """
    fs, path = open_fs(url)
    rows = [
        pq.read_table(f"{path}/rollouts/step={step:06d}").select(EXACT).sort_by("row_id")
        for step in (1, 2, 3)
    ]
    records = [json.loads(line) for line in fs.cat_file(f"{path}/metrics.jsonl").splitlines()]
    metrics = [
        (record["step"], [record["metrics"].get(name) for name in LEARNED])
        for record in records
        if record["phase"] == "train"
    ]
    assert committed(url)[-1] == 3
    return rows, metrics, read_model(f"{checkpoint_url(url, 3)}/policy")


def check_equal(url, straight):
    rows, metrics, model = outcome(url)
    for step, (got, expected) in enumerate(zip(rows, straight[0], strict=True), start=1):
        assert got.equals(expected), f"rows of step {step}"
    assert metrics == straight[1]
    assert model.keys() == straight[2].keys()
    assert all(model[name].equal(straight[2][name]) for name in model)


@pytest.fixture(scope="module")
def sweep(plan, workers, digits_task, tmp_path_factory):
    return Sweep(plan, digits_task, workers.scheduler_address, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def straight(sweep):
    """The outcome of a run whose store never fails, and its operations."""
    sweep.plan.set(but=BEAT)
    url = sweep.place()
    sweep.run(url)
    operations = [(name, path.rpartition("/")[2]) for name, path, _ in sweep.plan.operations()]
    # another run may be spared to read so many records
    chance = operations.count(("cat_file", "COMMITTED"))
    return outcome(url), operations[: len(operations) - chance]


def fail_at(sweep, at, how):
    """Run with a failure at operation ``at``; return the URL."""
    url = sweep.place()
    sweep.plan.set(at, how, but=BEAT)
    sweep.run(url)
    assert len(sweep.plan.operations()) >= at, "the failure was not met"
    return url


def die_at(sweep, at, how):
    """Run with a process killed at operation ``at``, and start the command again; return the
    URL.
    """
    url = sweep.place()
    sweep.plan.set(at, how, but=BEAT)
    code = sweep.run_elsewhere(url)
    assert code or restarted(url), f"nobody was killed: {sweep.plan.operations()[at - 2 : at + 1]}"
    sweep.plan.set(but=BEAT)
    if not has_ended(url):  # it is refused when it has
        sweep.run(url)
    return url


def restarted(url):
    """Tell whether a run ended well although a worker died, which it has replaced."""
    fs, path = open_fs(f"{url}/summary.json")
    return bool(json.loads(fs.cat_file(path))["restarts"])


def has_ended(url):
    """Tell whether a run has completed its steps; one that failed, since a worker died, says so
    in the same file.
    """
    fs, path = open_fs(f"{url}/summary.json")
    return fs.exists(path) and json.loads(fs.cat_file(path))["status"] == "complete"


def problems_of(sweep, straight, how, attempt, every, leave=()):
    """Return what went wrong at which operation: the first, the last and of ``every`` so many one,
    but for those named in ``leave``. Each way to fail takes other ones of a sample.
    """
    expected, operations = straight
    problems = {}
    places = [
        (at, operation)
        for at, operation in enumerate(operations, start=1)
        if operation[0] not in leave
    ]
    offset = 1 + 2 * HOWS.index(how) % 4  # quarters: before, and after
    sample = {*places[offset * every // 4 :: every], places[0], places[-1]}
    for at, operation in sorted(sample):
        try:
            check_equal(attempt(sweep, at, how), expected)
        except (Exception, SystemExit) as error:
            problems[at, *operation] = f"{type(error).__name__}: {error}"
            print(at, operation, problems[at, *operation], flush=True)
    return problems


def test_a_run_killed_while_it_writes_is_the_same_when_it_is_started_again(sweep, straight):
    expected, operations = straight
    # the last commit
    at = max(index for index, (name, _) in enumerate(operations, start=1) if name == "create")
    check_equal(die_at(sweep, at, How.KILL_AFTER), expected)


def test_checkpoints_that_cannot_be_deleted_cost_no_run(sweep, straight):
    url = sweep.place()
    sweep.plan.set(always="rm */step=??????-????", but=BEAT)
    sweep.run(url, "storage.retry_seconds=0.2")
    sweep.plan.set(but=BEAT)
    check_equal(url, straight[0])


def test_a_trace_that_cannot_be_written_costs_no_run(sweep, straight):
    url = sweep.place()
    sweep.plan.set(always="* */trace/*", but=BEAT)
    sweep.run(url, "storage.retry_seconds=0.2", "observe.trace=true")
    assert any("/trace/" in path for _, path, _ in sweep.plan.operations())
    sweep.plan.set(but=BEAT)
    check_equal(url, straight[0])


EVERY = [pytest.param(60, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.sweep)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_that_passes_changes_nothing_at_any_operation(sweep, straight, how, every):
    assert problems_of(sweep, straight, how, fail_at, every) == {}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("how", DEATHS)
def test_a_run_killed_at_any_change_is_the_same_when_it_is_started_again(
    sweep, straight, how, every
):
    """A death at an operation that only reads is one after the change before it."""
    assert problems_of(sweep, straight, how, die_at, every, READS) == {}
