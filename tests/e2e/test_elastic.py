"""An elastic run goes on with the workers that there are, and gives what a run gives whose workers
stay.

With ``-s`` it prints what each change cost.
"""

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from distributed import Client

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver import launch_loop
from siirl_dask.driver import run as run_module
from siirl_dask.driver.phases import dags
from siirl_dask.driver.recovery.elastic import ElasticWorkers
from siirl_dask.nodes import generate
from tests.clusters import local_cluster
from tests.conftest import Finished, digits_overrides
from tests.e2e.test_resume import check_same
from tests.e2e.traps import start_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ALONE = [
    "cluster.placement={}",
    "run.lookahead=1",
    "checkpoint.every=20",
    "rollout.work_stealing=false",  # the tests know which workers generate a step's rows
]
ELASTIC = ["cluster.elastic=true", "cluster.replacement_timeout=0.5", "run.max_restarts=1"]
PPO = shipped("quickstart_ppo.yaml")
SHARDS = ["trainer.backend=fsdp", "critic.backend=fsdp"]
VLLM = ["rollout.engine=vllm", "rollout.vllm.kv_cache_memory=16MiB"]
NO_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
SWEEP = pytest.mark.sweep


def build(device, rank, *, role, inner, seen, options):
    """Build a role, and note that in a file of this process."""
    with Path(seen, f"{role}-{os.getpid()}").open("a") as file:
        file.write(f"{rank.rank} of {rank.size}\n")
    return inner(device, rank, **options)


def generate_at_gates(ctx, table, *, rollout, seen):
    """Wait as long as there is a gate for this step, then note that it is generated."""
    gate = Path(seen, f"gate-{ctx.step}")
    while gate.exists():
        Path(seen, f"at-{ctx.step}").touch()
        time.sleep(0.02)
    with Path(seen, "generated").open("a") as file:
        file.write(f"{ctx.step}\n")
    return generate(ctx, table, rollout=rollout)


generate_at_gates.__contract__ = replace(generate.__contract__, depends_on_options=None)


def with_gates(dag, seen):
    return dag.replace(
        "rollout", fn=partial(generate_at_gates, seen=seen, **dag.node("rollout").options)
    )


def with_notes(dag, seen):
    """Return the DAG with builders that note that they are called. What the others declare about
    themselves is lost.
    """

    def noted(role):
        inner, options = role.build.func, role.build.keywords
        return replace(
            role, build=partial(build, role=role.name, inner=inner, options=options, seen=seen)
        )

    return replace(dag, roles=tuple(map(noted, dag.roles)))


class Gates:
    """Has a run stop before it generates a step, until something was done."""

    def __init__(self, folder):
        self._folder, self._doing, self._failed = folder, [], []

    def at(self, step, do):
        gate = self._folder / f"gate-{step}"
        gate.touch()

        def work():
            try:
                while not (self._folder / f"at-{step}").exists():
                    time.sleep(0.02)
                do()
            except BaseException as error:
                self._failed.append(error)
                raise
            finally:
                gate.unlink()

        self._doing.append(threading.Thread(target=work, daemon=True))
        self._doing[-1].start()

    def check(self):
        for thread in self._doing:
            thread.join(60)
            assert not thread.is_alive(), "the run never came to a gate"
        assert not self._failed


def wait_for_try(run, number):
    """Wait until the ``number``-th try of a run begins: by then it knows what it has lost."""
    deadline = time.monotonic() + 60
    while not (run / "attempts" / f"{number:04d}.json").exists():
        assert time.monotonic() < deadline, "nothing was noticed"
        time.sleep(0.02)


@pytest.fixture
def seen(tmp_path):
    folder = tmp_path / "seen"
    folder.mkdir()
    return folder


@pytest.fixture
def begin(digits_task, tmp_path, seen):
    def begin(name, address, *overrides, config_file=None, change=with_notes):
        given = [
            *digits_overrides(digits_task, tmp_path / name),
            *ALONE,
            f"cluster.address={address}",
            *overrides,
        ]
        file = load_config_file(config_file or shipped("quickstart.yaml"), given)
        dag, validation = dags(file)
        return Finished(
            tmp_path / name,
            run_module.run(file.config, change(with_gates(dag, str(seen)), str(seen)), validation),
        )

    return begin


@pytest.fixture
def joined(monkeypatch):
    """Waits until the driver has noticed workers that it may take in."""
    made = []

    class Seen(ElasticWorkers):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    def wait():
        deadline = time.monotonic() + 60
        while not made[-1]._joined:
            assert time.monotonic() < deadline, "no worker was taken in"
            time.sleep(0.02)

    monkeypatch.setattr(launch_loop, "ElasticWorkers", Seen)
    return wait


@pytest.fixture
def bare(begin, seen):
    """A cluster of workers without nannies, and the run there that nobody disturbs:
    ``bare("key=value", ...)``.
    """
    with ExitStack() as stack:

        def start(*overrides, workers=2, **how):
            cluster = stack.enter_context(local_cluster(0))
            client = stack.enter_context(Client(cluster))
            started = Bare(
                client, cluster.scheduler_address, start_workers(cluster.scheduler_address, workers)
            )
            stack.callback(started.end)
            client.wait_for_workers(workers, timeout=60)
            straight = begin("straight", started.address, *overrides, **how)
            for file in seen.iterdir():
                file.unlink()
            return started, straight

        yield start


@dataclass
class Bare:
    client: Client
    address: str
    processes: list

    def join(self):
        self.processes += start_workers(self.address, 1, first=len(self.processes))

    def retire(self, name):
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        self.client.retire_workers(
            [address for address, info in workers.items() if info["name"] == name]
        )

    def end(self):
        for process in self.processes:
            process.kill()


CASES = [
    pytest.param(None, [], ["policy"], 1, id="torch"),
    pytest.param(None, SHARDS, ["policy"], 4, id="fsdp", marks=SWEEP),
    pytest.param(None, VLLM, ["policy"], 1, id="vllm", marks=[NO_VLLM, SWEEP]),
    pytest.param(PPO, [], ["policy", "critic"], 1, id="ppo", marks=SWEEP),
    pytest.param(PPO, SHARDS, ["policy", "critic"], 4, id="ppo-fsdp"),
    pytest.param(
        PPO, [*SHARDS, *VLLM], ["policy", "critic"], 4, id="ppo-fsdp-vllm", marks=[NO_VLLM, SWEEP]
    ),
]
"""Configuration, overrides, roles that learn, and how often each worker that stays builds those."""


@pytest.mark.parametrize(("config_file", "overrides", "learners", "built"), CASES)
def test_workers_join_die_and_are_retired_and_nothing_else_changes(
    begin, bare, seen, joined, capsys, config_file, overrides, learners, built
):
    steps, gates, how = (
        ["run.steps=9", "cluster.workers=2", *overrides],
        Gates(seen),
        {"config_file": config_file},
    )
    cluster, straight = bare(*steps, **how)
    gates.at(2, lambda: (cluster.join(), joined()))
    gates.at(6, lambda: cluster.processes[1].kill())
    gates.at(8, lambda: cluster.retire("2"))
    changed = begin("changed", cluster.address, *steps, *ELASTIC, "observe.progress=true", **how)
    gates.check()
    restarts = changed.summary.restarts
    print(
        *(
            f"{one.cause[:90]} | {one.seconds:.1f} s, {one.steps_again} steps again"
            for one in restarts
        ),
        sep="\n",
    )
    check_same(straight, changed, roles=learners, tolerance=1e-5, steps=9)
    assert [restart.workers for restart in restarts] == [3, 2, 1]
    assert restarts[0].steps_again == 0
    assert changed.summary.workers == 1
    by = [{*changed.table("rollouts", step)["worker"].to_pylist()} for step in range(1, 10)]
    assert by == [{"0", "1"}] * 4 + [{"0", "1", "2"}] + [{"0", "2"}] * 2 + [{"0"}] * 2
    generated = (seen / "generated").read_text().split()
    once = {1: 2, 2: 2, 3: 2, 4: 2, 5: 3, 7: 2, 9: 1}  # 6 and 8 were under way when a worker left
    assert {step: generated.count(str(step)) for step in once} == once, "generated again"
    stayed = cluster.processes[0].pid
    for role, times in {"rollout": 1, "reward": 1, **dict.fromkeys(learners, built)}.items():
        assert len((seen / f"{role}-{stayed}").read_text().splitlines()) == times, (
            f"{role} was built again"
        )
    out = capsys.readouterr().out
    assert "taking in 1 more worker after step 4: '2'" in out
    assert "going on with 2 workers instead of 3: no other came within 0.5 s" in out


def test_roles_of_a_placement_move_where_one_would_be_without_a_worker(
    begin, bare, seen, joined, tmp_path
):
    """One generates and one learns; a third comes to generate, and learns when the second one is
    gone.
    """

    def kill():  # and let nobody generate before that is known
        cluster.processes[1].kill()
        wait_for_try(tmp_path / "changed", 3)

    steps, gates = ["run.steps=7", "cluster.workers=2"], Gates(seen)
    placed = ["cluster.placement={rollout: [0], reward: [0], policy: [1]}"]
    cluster, straight = bare(*steps, *placed)
    gates.at(2, lambda: (cluster.join(), joined()))
    gates.at(6, kill)
    changed = begin("changed", cluster.address, *steps, *placed, *ELASTIC)
    gates.check()
    check_same(straight, changed, tolerance=1e-5, steps=7)
    assert [restart.workers for restart in changed.summary.restarts] == [3, 2]
    by = [{*changed.table("rollouts", step)["worker"].to_pylist()} for step in range(1, 8)]
    assert by == [{"0"}] * 4 + [{"0", "2"}] + [{"0"}] * 2
    of = {
        path.name: path.read_text().splitlines()
        for path in seen.glob("*-*")
        if path.name[0] in "rp"
    }
    pids = [process.pid for process in cluster.processes]
    assert of == {
        f"rollout-{pids[0]}": ["0 of 1"],
        f"reward-{pids[0]}": ["0 of 1"],
        f"policy-{pids[1]}": ["0 of 1"],
        f"rollout-{pids[2]}": ["1 of 2"],
        f"reward-{pids[2]}": ["1 of 2"],
        f"policy-{pids[2]}": ["0 of 1"],
    }


@pytest.mark.sweep
def test_workers_move_where_the_shards_of_a_critic_and_a_policy_need_two_each(
    begin, bare, seen, joined, tmp_path
):
    """Two of three workers learn, in shards of two: neither three nor one could."""

    def kill():
        cluster.processes[1].kill()
        wait_for_try(tmp_path / "changed", 3)

    steps, gates = ["run.steps=7", "cluster.workers=3", *SHARDS], Gates(seen)
    placed = ["cluster.placement={rollout: [0], reward: [0], policy: [1, 2], critic: [1, 2]}"]
    placed += ["trainer.fsdp.shard_size=2", "critic.fsdp.shard_size=2"]
    # builders say that shards divide their workers
    as_it_is = {"config_file": PPO, "change": lambda dag, seen: dag}
    cluster, straight = bare(*steps, *placed, workers=3, **as_it_is)
    gates.at(2, lambda: (cluster.join(), joined()))
    gates.at(6, kill)
    changed = begin("changed", cluster.address, *steps, *placed, *ELASTIC, **as_it_is)
    gates.check()
    check_same(straight, changed, roles=["policy", "critic"], tolerance=1e-5, steps=7)
    assert [restart.workers for restart in changed.summary.restarts] == [4, 3]
    by = [{*changed.table("rollouts", step)["worker"].to_pylist()} for step in range(1, 8)]
    assert by == [{"0"}] * 4 + [{"0", "3"}] + [{"0"}] * 2
    generated = (seen / "generated").read_text().split()
    once = {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 7: 1}
    assert {step: generated.count(str(step)) for step in once} == once, "generated again"
