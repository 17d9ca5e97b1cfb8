"""An elastic run goes on with the workers that there are, and gives what a run gives whose workers stay.

With ``-s`` it prints what each change cost.
"""

import os
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from distributed import Client

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver import run as run_module
from siirl_dask.driver.elastic import Elastic
from siirl_dask.driver.phases import dags
from siirl_dask.nodes import generate
from tests.clusters import local_cluster
from tests.conftest import Finished, digits_overrides
from tests.e2e.test_resume import EXACT, LOSSES, weights
from tests.e2e.traps import start_workers

pytestmark = pytest.mark.slow
ALONE = ["cluster.placement={}", "run.lookahead=1", "checkpoint.every=20"]
ELASTIC = ["cluster.elastic=true", "cluster.replacement_timeout=0.5", "run.max_restarts=1"]


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


def watched(dag, seen):
    def noted(role):
        inner, options = role.build.func, role.build.keywords
        return replace(role, build=partial(build, role=role.name, inner=inner, options=options, seen=seen))

    gated = partial(generate_at_gates, seen=seen, **dag.node("rollout").options)
    return replace(dag, roles=tuple(map(noted, dag.roles))).replace("rollout", fn=gated)


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
        assert not self._failed
        for thread in self._doing:
            thread.join(10)


@pytest.fixture
def seen(tmp_path):
    folder = tmp_path / "seen"
    folder.mkdir()
    return folder


@pytest.fixture
def begin(digits_task, tmp_path, seen):
    def begin(name, address, *overrides):
        given = [*digits_overrides(digits_task, tmp_path / name), *ALONE, f"cluster.address={address}", *overrides]
        file = load_config_file(shipped("quickstart.yaml"), given)
        dag, validation = dags(file)
        return Finished(tmp_path / name, run_module.run(file.config, watched(dag, str(seen)), validation))

    return begin


@pytest.fixture
def joined(monkeypatch):
    """Waits until the driver has noticed workers that it may take in."""
    made = []

    class Seen(Elastic):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    def wait():
        deadline = time.monotonic() + 60
        while not made[-1]._joined:
            assert time.monotonic() < deadline, "no worker was taken in"
            time.sleep(0.02)

    monkeypatch.setattr(run_module, "Elastic", Seen)
    return wait


def check_equal(straight, changed, steps):
    for step in range(1, steps + 1):
        assert changed.table("rollouts", step).select(EXACT).equals(straight.table("rollouts", step).select(EXACT)), (
            step
        )
    records = [run.records() for run in (straight, changed)]
    assert [record["step"] for record in records[1]] == list(range(1, steps + 1))
    for expected, got in zip(*records, strict=True):
        for name in set(LOSSES) & set(expected["metrics"]):
            assert got["metrics"][name] == pytest.approx(expected["metrics"][name], abs=1e-5), (expected["step"], name)
    for name, tensor in weights(straight).items():
        assert (weights(changed)[name] - tensor).abs().max() <= 1e-5, name


def test_workers_join_die_and_are_retired_and_nothing_else_changes(begin, seen, joined, capsys):
    steps, processes = ["run.steps=9", "cluster.workers=2"], []
    with local_cluster(0) as bare, Client(bare) as client:
        address = bare.scheduler_address
        processes += start_workers(address, 2)
        client.wait_for_workers(2, timeout=60)
        straight = begin("straight", address, *steps)
        for file in seen.iterdir():
            file.unlink()
        gates = Gates(seen)

        def join():
            processes.extend(start_workers(address, 1, first=2))
            joined()

        def retire():
            workers = {
                info["name"]: address for address, info in client.scheduler_info(n_workers=-1)["workers"].items()
            }
            client.retire_workers([workers["2"]])

        gates.at(2, join)
        gates.at(6, lambda: processes[1].kill())
        gates.at(8, retire)
        try:
            changed = begin("changed", address, *steps, *ELASTIC, "observe.progress=true")
            gates.check()
        finally:
            for process in processes:
                process.kill()
    restarts = changed.summary.restarts
    print(*(f"{one.cause[:90]} | {one.seconds:.1f} s, {one.steps_again} steps again" for one in restarts), sep="\n")
    check_equal(straight, changed, 9)
    assert [restart.workers for restart in restarts] == [3, 2, 1]
    assert restarts[0].steps_again == 0
    assert changed.summary.workers == 1
    by = [{*changed.table("rollouts", step)["worker"].to_pylist()} for step in range(1, 10)]
    assert by == [{"0", "1"}] * 4 + [{"0", "1", "2"}] + [{"0", "2"}] * 2 + [{"0"}] * 2
    generated = (seen / "generated").read_text().split()
    once = {1: 2, 2: 2, 3: 2, 4: 2, 5: 3, 7: 2, 9: 1}  # 6 and 8 were under way when a worker left
    assert {step: generated.count(str(step)) for step in once} == once, "generated again"
    stayed = processes[0].pid
    for role in ("rollout", "reward", "policy"):
        assert len((seen / f"{role}-{stayed}").read_text().splitlines()) == 1, f"{role} was built again"
    out = capsys.readouterr().out
    assert "taking in 1 more worker after step 4: '2'" in out
    assert "going on with 2 workers instead of 3: no other came within 0.5 s" in out


def test_roles_of_a_placement_move_where_one_would_be_without_a_worker(begin, seen, joined):
    """One generates and one learns; a third comes to generate, and learns when the second one is gone."""
    steps, processes = ["run.steps=7", "cluster.workers=2"], []
    placed = ["cluster.placement={rollout: [0], reward: [0], policy: [1]}"]
    with local_cluster(0) as bare, Client(bare) as client:
        address = bare.scheduler_address
        processes += start_workers(address, 2)
        client.wait_for_workers(2, timeout=60)
        straight = begin("straight", address, *steps, *placed)
        for file in seen.iterdir():
            file.unlink()
        gates = Gates(seen)

        def join():
            processes.extend(start_workers(address, 1, first=2))
            joined()

        gates.at(2, join)
        gates.at(6, lambda: processes[1].kill())
        try:
            changed = begin("changed", address, *steps, *placed, *ELASTIC)
            gates.check()
        finally:
            for process in processes:
                process.kill()
    check_equal(straight, changed, 7)
    assert [restart.workers for restart in changed.summary.restarts] == [3, 2]
    by = [{*changed.table("rollouts", step)["worker"].to_pylist()} for step in range(1, 8)]
    assert by == [{"0"}] * 4 + [{"0", "2"}] + [{"0"}] * 2
    of = {path.name: path.read_text().splitlines() for path in seen.glob("*-*") if path.name[0] in "rp"}
    pids = [process.pid for process in processes]
    assert of == {
        f"rollout-{pids[0]}": ["0 of 1"],
        f"reward-{pids[0]}": ["0 of 1"],
        f"policy-{pids[1]}": ["0 of 1"],
        f"rollout-{pids[2]}": ["1 of 2"],
        f"reward-{pids[2]}": ["1 of 2"],
        f"policy-{pids[2]}": ["0 of 1"],
    }
