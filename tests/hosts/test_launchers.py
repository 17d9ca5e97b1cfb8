"""The recipes of configs/clusters start the quickstart on three hosts, as they are shipped, and
leave nothing there.

Each host's own name is at 127.0.1.1, as Debian has it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
import yaml

from siirl_dask.config.file.layers import shipped_files
from siirl_dask.testing.hosts import Lab, Names
from tests.hosts.slurm import jobs, slurm, why_no_slurm
from tests.hosts.ssh import ssh, why_no_ssh

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
needs_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))
needs_ssh = pytest.mark.skipif(why_no_ssh() is not None, reason=str(why_no_ssh()))
needs_mpi = pytest.mark.skipif(
    which("mpirun") is None or find_spec("dask_mpi") is None,
    reason="needs mpirun (Debian: openmpi-bin) and dask-mpi",
)
CLUSTERS = shipped_files("clusters")
CLI = (sys.executable, "-m", "siirl_dask.cli")
SMALL = (
    "rollout.engine=transformers",
    "run.steps=2",
    "data.batch_size=8",
    "rollout.n=4",
    "validation.test_url=null",
)
APART = (
    "cluster.workers=3",
    "cluster.placement={rollout: [0], reward: [0], policy: [1, 2]}",
    *SMALL,
)
PAIR = ("cluster.placement={rollout: [0], reward: [0], policy: [1]}", *SMALL)
"""For a script that says itself how many workers there are."""
PROCESSES = (
    "ps axo args | grep -E 'dask_spec|dask_worker|dask worker' | grep -v -e grep -e defunct || true"
)


@pytest.fixture
def lab():
    with Lab(3, names=Names.LOOPBACK) as lab:
        yield lab


@pytest.fixture
def home(quickstarts_task, tmp_path, monkeypatch):
    """The folder that the driver is started in, where the quickstart's task is prepared; daemons
    have one beside it.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(quickstarts_task, tmp_path / "runs")
    (tmp_path / "daemons").mkdir()
    return tmp_path


def start(lab, env, *arguments):
    return lab.hosts[0].start(
        *arguments,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def full_paths(home):
    """Return settings that workers need which start in another folder."""
    task = home / "runs" / "sorting-0"
    files = {"data.url": "train", "validation.url": "validation"}
    return [
        f"model.path={task}/model",
        *(f"{key}={task}/{name}.parquet" for key, name in files.items()),
    ]


def check_quickstart(home, workers=3):
    summary = json.loads((home / "runs" / "quickstart" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["workers"]) == ("complete", 2, workers)


def wait_for(process, text, seconds=120):
    """Read what the process prints until ``text`` comes; it fails when the process ends before."""
    printed = ""
    while text not in printed:
        line = process.stdout.readline()
        assert line, f"{text!r} never came:\n{printed}"
        printed += line
    return printed


def left_over(lab, seconds=30):
    """Return the processes of Dask that still run on the hosts, once they had some time to end."""
    late = time.monotonic() + seconds
    while (
        left := "".join(host.run("sh", "-c", PROCESSES) for host in lab.hosts)
    ) and time.monotonic() < late:
        time.sleep(0.2)
    return left


@needs_slurm
def test_the_quickstart_runs_on_slurm_by_dask_jobqueue(lab, home):
    with slurm(lab, home / "daemons") as env:
        process = start(lab, env, *CLI, "quickstart", "--cluster", CLUSTERS["slurm.yaml"], *APART)
        printed = process.communicate()[0]
        assert process.returncode == 0, printed
        assert jobs(lab, env) == []
    check_quickstart(home)
    assert left_over(lab) == ""
    logs = [path.read_text() for path in (home / "slurm-logs").glob("*.err")]
    assert len({re.search(r"Start worker at: +tcp://([\d.]+)", log)[1] for log in logs}) == 3, (
        "not three hosts"
    )


@needs_slurm
def test_the_quickstart_runs_on_slurm_by_sbatch(lab, home):
    with slurm(lab, home / "daemons") as env:
        script = CLUSTERS["slurm.yaml"].with_name("slurm.sbatch")
        command = ("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", script)
        process = start(lab, env, *command, "quickstart", *PAIR)
        printed = process.communicate()[0]
        printed += "".join(path.read_text() for path in home.glob("slurm-*.out"))
        assert process.returncode == 0, printed
    check_quickstart(home, workers=2)
    assert left_over(lab) == ""
    assert not list(home.glob("slurm-*.json")), "the scheduler's file is left"


@needs_ssh
def test_the_quickstart_runs_over_ssh(lab, home):
    with ssh(lab, home / "daemons") as env:
        process = start(
            lab,
            env,
            *CLI,
            "quickstart",
            "--cluster",
            CLUSTERS["ssh.yaml"],
            *APART,
            *full_paths(home),
        )
        printed = process.communicate()[0]
        assert process.returncode == 0, printed
    check_quickstart(home)
    assert left_over(lab) == ""


@needs_ssh
@needs_mpi
def test_the_quickstart_runs_by_dask_mpi(lab, home):
    with ssh(lab, home / "daemons") as env:
        keys = (
            f"-i {env['HOME']}/.ssh/id_ed25519 -o UserKnownHostsFile={env['HOME']}/.ssh/known_hosts"
        )
        options = (
            "--allow-run-as-root --host host0:2,host1 -x PATH -x PYTHONPATH -x OMP_NUM_THREADS"
        )
        env |= {
            "OMPI_MCA_plm_rsh_args": keys,
            "MPIRUN": f"mpirun {options} --mca oob_tcp_if_include eth0",
        }
        env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
        script = CLUSTERS["ssh.yaml"].with_name("mpi.sh")
        process = start(lab, env, "bash", script, "2", "quickstart", *PAIR)
        printed = process.communicate()[0]
        logs = "".join(path.read_text() for path in home.glob("mpi-*.log"))
        assert process.returncode == 0, printed + logs
    check_quickstart(home, workers=2)
    assert left_over(lab) == ""
    assert not list(home.glob("mpi-*.json")), "the scheduler's file is left"


def test_the_commands_of_the_kubernetes_manifest_make_a_cluster_that_runs(lab, home):
    """No pods: their commands run on hosts, two workers a pod, with the driver's arguments."""
    kinds = {
        part["kind"]: part for part in yaml.safe_load_all(CLUSTERS["kubernetes.yaml"].read_text())
    }

    def command(kind):
        (container,) = kinds[kind]["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container.get("args", [])]
        return [word.replace("siirl-scheduler", "host0") for word in words]

    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    lab.hosts[0].start(*command("Deployment"), "--interface", "eth0", env=env, **quiet)
    for ordinal, host in enumerate(lab.hosts[1:]):
        pod = env | {"HOSTNAME": f"siirl-worker-{ordinal}", "WORKERS": "2"}
        host.start(*command("StatefulSet"), env=pod, **quiet)
    words = [
        word
        for word in command("Job")
        if not word.startswith(("siirl-dask", "run", "/config", "cluster.workers"))
    ]
    process = start(lab, env, *CLI, "quickstart", *words, "cluster.workers=4", *APART[1:])
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert json.loads((home / "runs" / "quickstart" / "summary.json").read_text())["workers"] == 4


@needs_slurm
@pytest.mark.sweep
def test_ctrl_c_while_jobs_wait_in_the_queue_ends_those_that_run(lab, home):
    with slurm(lab, home / "daemons") as env:
        how = ("quickstart", "--cluster", CLUSTERS["slurm.yaml"], *APART, "cluster.workers=4")
        process = start(lab, env, *CLI, *how)
        wait_for(process, "3 of 4 workers came")
        lab.hosts[0].signal(process, signal.SIGINT)
        printed = process.communicate()[0]
        assert process.returncode == 130, printed
        assert "stopped by the user" in printed
        assert "Traceback" not in printed
        assert jobs(lab, env) == []
    assert left_over(lab) == ""


@needs_slurm
@pytest.mark.sweep
def test_too_few_workers_in_time_are_counted_and_ended(lab, home):
    with slurm(lab, home / "daemons") as env:
        how = ("quickstart", "--cluster", CLUSTERS["slurm.yaml"], *APART, "cluster.workers=4")
        process = start(lab, env, *CLI, *how, "cluster.start_timeout=20")
        printed = process.communicate()[0]
        assert process.returncode == 1, printed
        assert re.search(
            r"error: [0-3] of 4 workers came up within cluster.start_timeout=20 s: ", printed
        )
        assert "their logs are in slurm-logs" in printed
        assert jobs(lab, env) == []
    assert left_over(lab) == ""


@needs_slurm
def test_a_job_that_slurm_refuses_ends_the_run_with_what_slurm_said(lab, home):
    spec = CLUSTERS["slurm.yaml"].read_text().replace("# queue: gpu", "queue: nowhere #")
    Path("mine.yaml").write_text(spec)
    with slurm(lab, home / "daemons") as env:
        process = start(lab, env, *CLI, "quickstart", "--cluster", "mine.yaml", *APART)
        printed = process.communicate()[0]
    assert process.returncode == 1, printed
    assert "invalid partition specified: nowhere" in printed
    assert "Traceback" not in printed


@needs_ssh
@pytest.mark.sweep
def test_ctrl_c_ends_what_was_started_over_ssh(lab, home):
    with ssh(lab, home / "daemons") as env:
        how = (
            "quickstart",
            "--cluster",
            CLUSTERS["ssh.yaml"],
            *APART,
            *full_paths(home),
            "run.steps=10000",
        )
        process = start(lab, env, *CLI, *how)
        wait_for(process, "step 1/10000")
        lab.hosts[0].signal(process, signal.SIGINT)
        printed = process.communicate()[0]
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert left_over(lab) == ""


@needs_ssh
def test_a_host_that_does_not_answer_ends_the_run_with_the_cause(lab, home):
    Path("mine.yaml").write_text(CLUSTERS["ssh.yaml"].read_text().replace("host2", "198.18.0.77"))
    with ssh(lab, home / "daemons") as env:
        process = start(lab, env, *CLI, "quickstart", "--cluster", "mine.yaml", *APART)
        printed = process.communicate()[0]
    assert process.returncode == 1, printed
    assert "198.18.0.77" in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert left_over(lab, 90) == "", "a worker without a scheduler ends after its death_timeout"
