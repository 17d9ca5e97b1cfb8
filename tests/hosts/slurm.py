"""Slurm on the hosts of a lab: Debian's packages slurm-wlm and munge, a partition ``main`` over
all hosts.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from siirl_dask.testing.hosts import Lab

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel")
CONFIG = """\
ClusterName=lab
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Return what is missing for Slurm, or None."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"Slurm needs {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def slurm(lab: Lab, folder: Path) -> Iterator[dict[str, str]]:
    """Start Slurm with its controller on the first host, and yield the environment of its users.
    Logs lie in ``folder``.
    """
    nodes = "\n".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=64000"
        for host in lab.hosts
    )
    (folder / "slurm.conf").write_text(
        CONFIG.format(controller=lab.hosts[0], folder=folder, nodes=nodes)
    )
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    scripts = Path(sys.executable).parent
    env = {
        **os.environ,
        "SLURM_CONF": f"{folder}/slurm.conf",
        "PATH": f"{scripts}:{os.environ['PATH']}",
    }
    munged = start_munged(folder)
    try:
        lab.hosts[0].start(
            "slurmctld", "-D", env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for host in lab.hosts:
            host.start(
                "slurmd",
                "-D",
                "-N",
                host.name,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        late = time.monotonic() + 60
        while (idle := sinfo(lab, env)) != f"{len(lab.hosts)} idle":
            assert time.monotonic() < late, (
                f"Slurm's hosts: {idle}\n{(folder / 'slurmctld.log').read_text()}"
            )
            time.sleep(0.1)
        yield env
    finally:
        munged.kill()
        munged.wait()


def start_munged(folder: Path) -> subprocess.Popen[bytes]:
    """Start one munged for all hosts: its socket is a path, and they share the file system."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {
        "socket": "munge.socket",
        "key-file": key.name,
        "pid-file": "munge.pid",
        "seed-file": "munge.seed",
    }
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    return subprocess.Popen(
        ["munged", "--foreground", "--force", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def sinfo(lab: Lab, env: dict[str, str]) -> str:
    """Return how many hosts are in which state, such as ``3 idle``."""
    command = lab.hosts[0].command("sinfo", "-h", "-o", "%D %t")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip()


def jobs(lab: Lab, env: dict[str, str]) -> list[str]:
    """Return the names of the jobs that wait or run."""
    return lab.hosts[0].run("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%j", env=env).split()
