"""A run that loses a worker goes on by itself: the others keep their processes and what they have
built in them.

With ``-s`` each case prints its seconds to notice, those until all are at work again, and the steps
done again.
"""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from distributed import Client

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.recovery import replacement
from siirl_dask.driver.run import run
from siirl_dask.errors import WorkerLost
from tests.clusters import local_cluster
from tests.conftest import Finished, digits_overrides
from tests.e2e.test_replay import generate_and_note
from tests.e2e.test_resume import check_same
from tests.e2e.traps import start_workers

TWO = ["cluster.workers=2", "cluster.placement={}", "run.steps=4", "checkpoint.every=2"]
PLACES = {
    "generate": (
        "siirl_dask.rollout.transformers_engine.engine",
        "TransformersEngine",
        "_generate_batch",
        4,
    ),
    "pull": ("siirl_dask.coordinator.databuffer.databuffer", "Databuffer", "pull", 12),
    "all-reduce": ("siirl_dask.training.learner", "Learner", "_norm", 7),
    "weights": ("siirl_dask.training.policy", "Policy", "weights", 4),
    "update": ("siirl_dask.training.learner", "Learner", "update", 4),
    "logprobs": ("siirl_dask.training.policy", "Policy", "logprobs", 4),
    "save": ("siirl_dask.training.files.checkpoint", "DistributedCheckpoint", "save", 2),
}
"""Functions in which a worker dies, and the call of them in which it does, in step 3 or 4 of 4."""


def killing(place, sign, marker):
    """Patch a function of this process: one of its calls is this process's last."""
    from importlib import import_module

    module, kind, name, fatal = PLACES[place]
    owner = getattr(import_module(module), kind)
    original, calls = getattr(owner, name), []

    def patched(*args, **kwargs):
        calls.append(1)
        if len(calls) == fatal:
            wait_until_stored(marker, place)
            marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), sign)
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def hanging(marker):
    """Patch a function of this process: its update never returns in the step in which a peer dies,
    and only once.

    So does a task that waits for its device behind a kernel of nccl that has lost its peer.
    """
    from siirl_dask.training.learner import Learner

    original, calls = Learner.update, []

    def patched(*args, **kwargs):
        calls.append(1)
        if len(calls) == PLACES["update"][3] and not marker.exists():
            marker.write_text(str(os.getpid()))
            while True:
                time.sleep(1)
        return original(*args, **kwargs)

    Learner.update = patched


def wait_until_stored(marker, place):
    """Before log-probs: until the rows of the step are stored, so that nobody has to generate
    them again.
    """
    run, deadline = Path(str(marker.parent).removesuffix("-seen")), time.monotonic() + 60
    while place == "logprobs" and not [*run.glob("stages/rollout/step=000004/_parts-*.json")]:
        assert time.monotonic() < deadline, "the rows were never stored"
        time.sleep(0.01)


def build(device, rank, *, role, inner, seen, place, sign, again, hangs, options):
    """Build a role, and tell where; the second worker dies once, at its place, and the first one
    may hang there.
    """
    marker = Path(seen, "dead")
    if role == "reward" and rank.rank == 0 and hangs:
        hanging(Path(seen, "hung"))
    if role == "reward" and rank.rank == 1 and place and (again or not marker.exists()):
        killing(place, sign, marker)
    built = inner(device, rank, **options)
    with Path(seen, f"{role}-{rank.rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    return built


def watched(dag, **about):
    roles = (
        replace(
            role,
            build=partial(
                build, role=role.name, inner=role.build.func, options=role.build.keywords, **about
            ),
        )
        for role in dag.roles
    )
    noting = partial(
        generate_and_note,
        notes=str(Path(about["seen"], "generated")),
        **dag.node("rollout").options,
    )
    return replace(dag, roles=tuple(roles)).replace("rollout", fn=noting)


def builds(folder, role, rank):
    """Process of each time that a role was built on a worker."""
    return [int(line) for line in (folder / f"{role}-{rank}").read_text().splitlines()]


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(2) as cluster:
        yield cluster


def config_of(task, url, address, *overrides):
    given = [*digits_overrides(task, url), *TWO, *overrides, f"cluster.address={address}"]
    return load_config_file(shipped("quickstart.yaml"), given)


@pytest.fixture(scope="module")
def straight(cluster, digits_task, tmp_path_factory):
    """Runs of which nobody is lost, one for each set of overrides: ``straight("key=value",
    ...)``.
    """
    folder, runs = tmp_path_factory.mktemp("straight"), {}

    def start(*overrides):
        if overrides not in runs:
            url = folder / str(len(runs))
            file = config_of(digits_task, url, cluster.scheduler_address, *overrides)
            dag, validation = dags(file)
            runs[overrides] = Finished(url, run(file.config, dag, validation))
        return runs[overrides]

    return start


@pytest.fixture
def lose(cluster, digits_task, tmp_path):
    """Train on a cluster whose second worker dies at a place."""

    def start(place, *overrides, sign=signal.SIGKILL, again=False, hangs=False, address=None):
        folder, url = tmp_path / "tried-seen", tmp_path / "tried"
        folder.mkdir()
        file = config_of(digits_task, url, address or cluster.scheduler_address, *overrides)
        dag, validation = dags(file)
        about = {
            "seen": str(folder),
            "place": place,
            "sign": int(sign),
            "again": again,
            "hangs": hangs,
        }
        return Finished(url, run(file.config, watched(dag, **about), validation)), folder

    return start


SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
STOP = ["cluster.peer_timeout=2"]
CASES = [
    pytest.param("update", signal.SIGKILL, [], id="update"),
    pytest.param(
        "generate", signal.SIGKILL, ["checkpoint.every=0"], id="generate-without-checkpoint"
    ),
    *(
        pytest.param(at, signal.SIGKILL, [], marks=SWEEP if at == "generate" else SLOW, id=at)
        for at in PLACES
        if at != "update"
    ),
    *(
        pytest.param(
            at, signal.SIGSTOP, STOP, marks=SLOW if at == "all-reduce" else SWEEP, id=f"{at}-stop"
        )
        for at in PLACES
    ),
]


@pytest.mark.parametrize(("place", "sign", "overrides"), CASES)
def test_a_run_goes_on_when_a_worker_is_lost_and_gives_what_it_would_have_given(
    straight, lose, place, sign, overrides
):
    tried, folder = lose(place, *overrides, sign=sign)
    dead = int((folder / "dead").read_text())
    (restart,) = tried.summary.restarts
    seconds = f"{restart.silence or 0:.1f} | {restart.seconds:.1f} | {restart.steps_again}"
    print(f"| {place} | {sign.name} | {seconds} | `{restart.cause[:90]}` |")
    assert "worker '1'" in restart.cause
    resumed_at = restart.steps - restart.steps_again
    expected = straight(*(each for each in overrides if each not in STOP))
    check_same(
        expected,
        tried,
        roles=() if "checkpoint.every=0" in overrides else ("policy",),
        tolerance=1e-5,
    )
    generated = (folder / "generated").read_text().split()
    stored = restart.steps + (place == "logprobs")
    assert [generated.count(str(step)) for step in range(1, stored + 1)] == [2] * stored, "again"
    for role in ("rollout", "reward"):
        assert len(builds(folder, role, 0)) == 1, (
            f"{role} was built again on the worker that was left"
        )
        assert len(set(builds(folder, role, 1)) - {dead}) == 1
    assert len(builds(folder, "policy", 0)) == (1 if resumed_at else 2)
    assert len(set(builds(folder, "policy", 0))) == 1


def test_a_worker_that_never_leaves_its_task_is_killed_and_the_run_goes_on_with_another(
    straight, lose, monkeypatch
):
    monkeypatch.setattr(replacement, "LEAVE_TIMEOUT", 3.0)
    tried, folder = lose("update", "run.max_restarts=1", hangs=True)
    hung = int((folder / "hung").read_text())
    check_same(straight(), tried, tolerance=1e-5)
    first, second = builds(folder, "rollout", 0)
    assert first == hung != second
    assert not psutil.pid_exists(hung)


@pytest.mark.slow
def test_shards_are_built_again_in_the_same_processes(straight, lose):
    fsdp = ["trainer.backend=fsdp"]
    tried, folder = lose("update", *fsdp)
    check_same(straight(*fsdp), tried, tolerance=1e-5)
    assert len(builds(folder, "rollout", 0)) == 1
    assert len(builds(folder, "policy", 0)) == 2
    assert len(set(builds(folder, "policy", 0))) == 1


@pytest.mark.slow
def test_a_worker_that_dies_each_time_ends_the_run_with_the_first_cause(lose):
    with pytest.raises(WorkerLost, match="during train step 4") as raised:
        lose("update", "run.max_restarts=2", "checkpoint.every=0", again=True)
    (note,) = raised.value.__notes__
    assert note.startswith(
        "it was tried 2 times more without a new step (run.max_restarts=2); the last time: worker "
        "'1'"
    )


@pytest.mark.parametrize(
    ("place", "sign"),
    [
        pytest.param("generate", signal.SIGKILL, marks=SWEEP),
        pytest.param("generate", signal.SIGSTOP, marks=SWEEP),
        pytest.param("all-reduce", signal.SIGSTOP, marks=SLOW),
    ],
)
def test_where_nobody_starts_workers_another_one_that_is_there_takes_the_place(
    straight, lose, place, sign
):
    """The frozen one has no nanny that kills it: in an all-reduce the other waits for it in
    gloo, and for an hour.
    """
    with local_cluster(0) as bare:
        workers = start_workers(bare.scheduler_address, 3)
        with Client(bare) as client:
            client.wait_for_workers(3, timeout=60)
        try:
            overrides = ["cluster.peer_timeout=2", "rollout.work_stealing=false"]
            tried, folder = lose(place, *overrides, sign=sign, address=bare.scheduler_address)
        finally:
            for worker in workers:
                worker.kill()
    check_same(straight(), tried, tolerance=1e-5)
    (restart,) = tried.summary.restarts
    print(
        f"| {place} | {sign.name} | {restart.silence or 0:.1f} | {restart.seconds:.1f} | "
        f"{restart.steps_again}"
    )
    if place == "generate":  # before an all-reduce the rows of the step are stored, and stay
        assert {*tried.table("rollouts", 4)["worker"].to_pylist()} == {"0", "2"}
    assert len(builds(folder, "rollout", 0)) == 1
    assert len({*builds(folder, "rollout", 1)} - {int((folder / "dead").read_text())}) == 1
