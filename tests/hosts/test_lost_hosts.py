"""A run of several hosts goes on by itself when one of them is without power, and generates nothing
again.

With ``-s`` each case prints a row of docs/benchmarks/faults.md.
"""

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.testing.hosts import Lab, Names
from tests.conftest import Finished, digits_overrides
from tests.e2e.test_resume import check_same
from tests.hosts.conftest import forked_cluster
from tests.hosts.slurm import jobs, slurm
from tests.hosts.ssh import ssh
from tests.hosts.test_launchers import CLI, CLUSTERS, needs_slurm, needs_ssh, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SWEEP = pytest.mark.sweep
STEPS, AT = (
    6,
    4,
    # steps of a run, and the one in which a host is lost: a step was stored since the last
    # checkpoint
)
SAMPLER, LEARNER = "generate", "update"
LOST = {
    SAMPLER: "{rollout: [1], reward: [1], policy: [0, 2]}",
    LEARNER: "{rollout: [0], reward: [0], policy: [1, 2]}",
}
"""The placement in which the second of three workers generates, or learns, by the gate that it
stands at."""
GIVEN = [f"run.steps={STEPS}", "checkpoint.every=2", "cluster.workers=3"]


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.fixture
def config(notes, tmp_path):
    """The quickstart, which notes each step that a worker generates, and has a gate there and
    one before updates.
    """
    here, about = Path(__file__).with_name("gates.py"), {"notes": str(notes)}
    gate = {
        "run": f"{here}:wait_before_update",
        "role": "policy",
        "after": "advantage",
        "with": about,
    }
    changed = {
        "rollout": {"run": f"{here}:generate_and_note", "with": about},
        "gate": gate,
        "minibatches": {"after": "gate"},
    }
    file = tmp_path / "gates.yaml"
    file.write_text(yaml.safe_dump({"base": str(shipped("quickstart.yaml")), "nodes": changed}))
    return file


@pytest.fixture(scope="module")
def straight(digits_task, shared_cluster, tmp_path_factory):
    """The run of which nobody is lost, on one host."""
    url = tmp_path_factory.mktemp("straight") / "run"
    given = [*digits_overrides(digits_task, url), *GIVEN, f"cluster.placement={LOST[LEARNER]}"]
    file = load_config_file(
        shipped("quickstart.yaml"), [*given, f"cluster.address={shared_cluster.scheduler_address}"]
    )
    dag, validation = dags(file)
    return Finished(url, run(file.config, dag, validation))


class Disturbed:
    """A run with a gate in one of its steps, at which a host is switched off."""

    def __init__(self, lab, url, notes, place):
        self.lab, self.url, self._notes, self._gate = lab, url, notes, notes / f"{place}-{AT}"
        self._gate.touch()
        self._printed = ""

    def lose(self, process, *hosts):
        """Switch hosts off once the run stands at the gate, and open that. Returns what the row
        of a table says.
        """
        self._wait(
            process,
            lambda: self._gate.with_name(f"at-{self._gate.name}").exists() and self._stored(),
        )
        for host in hosts:
            self.lab.power_off(host)
        since = time.monotonic()
        self._gate.unlink()
        noticed = self._read(process, "restart 1 of 3") - since
        there = self._read(process, "at work again after") - since
        self._printed += process.stdout.read()
        assert process.wait(60) == 0, self._printed
        assert "Traceback" not in self._printed, self._printed
        return f"| {noticed:.1f} | {there:.1f} | {time.monotonic() - since:.1f} |"

    def check(self, straight, workers):
        """Hold the run to the straight one: nothing is generated twice, and ``workers`` go on."""
        summary = json.loads((self.url / "summary.json").read_text())
        (restart,) = summary["restarts"]
        assert restart["workers"] == workers
        generated = (self._notes / "generated").read_text().split()
        assert sorted(map(int, generated)) == [*range(1, STEPS + 1)], "generated again"
        check_same(straight, Finished(self.url, summary), tolerance=1e-5, steps=STEPS)
        return restart["steps_again"]

    def _stored(self):
        """Whether all that was generated is committed: at the gate before updates, the step
        under way as well.
        """
        last = AT - self._gate.name.startswith(SAMPLER)
        return any((self.url / "rollouts" / f"step={last:06d}").glob("_parts-*.json"))

    def _wait(self, process, reached):
        deadline = time.monotonic() + 400
        while not reached():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "the run never came to the gate"
            time.sleep(0.02)

    def _read(self, process, text):
        for line in process.stdout:
            self._printed += line
            if line.startswith(text):
                return time.monotonic()
        raise AssertionError(f"{text!r} never came:\n{self._printed}")


SPARE, ELASTIC = [], ["cluster.elastic=true", "cluster.replacement_timeout=1"]
CASES = [
    pytest.param(LEARNER, ["cluster.peer_timeout=5"], 4, [1], 3, id="learner-soon"),
    pytest.param(LEARNER, SPARE, 4, [1], 3, id="learner-spare", marks=SWEEP),
    pytest.param(SAMPLER, SPARE, 4, [1], 3, id="sampler-spare", marks=SWEEP),
    pytest.param(LEARNER, SPARE, 5, [1, 3], 3, id="learner-and-a-spare", marks=SWEEP),
    pytest.param(LEARNER, ELASTIC, 3, [1], 2, id="learner-elastic", marks=SWEEP),
    pytest.param(SAMPLER, ELASTIC, 3, [1], 2, id="sampler-elastic", marks=SWEEP),
    pytest.param(
        LEARNER,
        [*ELASTIC, "cluster.max_workers=3"],
        5,
        [1, 3],
        3,
        id="elastic-and-a-spare",
        marks=SWEEP,
    ),
]
"""Where the run is, how it goes on, the hosts that there are, which are lost, and the workers
with which it goes on."""


@pytest.mark.parametrize(("place", "overrides", "hosts", "lost", "workers"), CASES)
def test_a_run_goes_on_when_a_host_has_no_power_and_generates_nothing_again(
    straight, digits_on, config, notes, tmp_path, request, place, overrides, hosts, lost, workers
):
    with Lab(hosts) as lab:
        cluster = forked_cluster(lab.hosts[0], lab.hosts, tmp_path)
        run = Disturbed(lab, tmp_path / "run", notes, place)
        given = [*GIVEN, f"cluster.placement={LOST[place]}", "observe.progress=true", *overrides]
        driver = digits_on(cluster, lab.hosts[0], *given, config_file=config)
        row = run.lose(driver.process, *(lab.hosts[index] for index in lost))
    print(f"\n| {request.node.callspec.id} {row} {run.check(straight, workers)} |")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "daemons").mkdir()
    return tmp_path


def command(spec, config, digits_task, tmp_path, *overrides):
    """Return the command line of a run on the cluster of a spec."""
    given = [
        *digits_overrides(digits_task, tmp_path / "run"),
        *GIVEN,
        "observe.progress=true",
        *overrides,
    ]
    return (*CLI, "run", config, "--cluster", spec, *given)


@needs_slurm
@SWEEP
@pytest.mark.parametrize("processes", [1, 2])
def test_slurm_is_asked_for_another_job_when_the_host_of_one_has_no_power(
    straight, config, notes, digits_task, home, processes
):
    spec, workers = home / "slurm.yaml", 2 * processes
    spec.write_text(
        CLUSTERS["slurm.yaml"].read_text().replace("processes: 1", f"processes: {processes}")
    )
    learners = [*range(1, workers)]
    placed = f"cluster.placement={{rollout: [0], reward: [0], policy: {learners}}}"
    with Lab(3, names=Names.LOOPBACK) as lab, slurm(lab, home / "daemons") as env:
        run = Disturbed(lab, home / "run", notes, LEARNER)
        given = command(spec, config, digits_task, home, f"cluster.workers={workers}", placed)
        process = start(lab, env, *given)
        row = run.lose(process, lab.hosts[1])
        assert jobs(lab, env) == []
    print(f"\n| Slurm, {processes} workers a job {row} {run.check(straight, workers)} |")
    logs = [path.read_text() for path in (home / "slurm-logs").glob("*.err")]
    assert len({re.search(r"Start worker at: +tcp://([\d.]+)", log)[1] for log in logs}) == 3, (
        "not three hosts"
    )


@needs_ssh
@SWEEP
def test_over_ssh_a_host_more_than_workers_is_a_spare(straight, config, notes, digits_task, home):
    spec = home / "ssh.yaml"
    spec.write_text(
        CLUSTERS["ssh.yaml"].read_text().replace("host1, host2]", "host1, host2, host3]")
    )
    with Lab(4, names=Names.LOOPBACK) as lab, ssh(lab, home / "daemons") as env:
        run = Disturbed(lab, home / "run", notes, LEARNER)
        process = start(
            lab,
            env,
            *command(spec, config, digits_task, home, f"cluster.placement={LOST[LEARNER]}"),
        )
        row = run.lose(process, lab.hosts[1])
    print(f"\n| ssh, a spare host {row} {run.check(straight, 3)} |")
