"""Writes what the machine is: device, driver, versions, packages that may be absent.  python
probe.py OUT
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

import results
from tests.gpu import devices

HERE = Path(__file__).resolve().parent
VERSIONS = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "pyarrow",
    "dask",
    "distributed",
    "liger-kernel",
    "trl",
)
OPTIONAL = (
    "vllm",
    "flash_attn",
    "flash_attn_interface",
    "liger_kernel",
    "trl",
    "peft",
    "distributed",
    "duckdb",
)
PROGRAMS = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("free", "-g"),
    ("df", "-h", "/dev/shm", "/tmp"),
)


def version_of(package: str) -> str:
    """The version that is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def device_name() -> str:
    """The device's name, as torch has it."""
    if devices.ON_CPU:
        return f"cpu: {platform.processor() or platform.machine()}"
    if devices.count() == 0:
        return "none that torch can use"
    return torch.get_device_module(str(devices.kind())).get_device_name()


def show(command: tuple[str, ...]) -> None:
    """Print what a program says into the log."""
    print(f"$ {' '.join(command)}", flush=True)
    if shutil.which(command[0]) is None:
        print("not there")
        return
    subprocess.run(command, check=False, timeout=30)


def commit() -> str:
    """The commit of the bundle; unknown where the scripts were not bundled."""
    file = HERE / "commit.txt"
    return file.read_text().strip() if file.exists() else "unknown"


def main() -> None:
    out = Path(sys.argv[1])
    memory = devices.memory()[0] if devices.ON_CPU or devices.count() == 0 else _total_memory()
    results.append(
        out,
        part="probe",
        figure="machine",
        device=device_name(),
        on_cpu=devices.ON_CPU,
        devices=devices.count(),
        memory_gib=results.rounded(memory / 2**30),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        commit=commit(),
        versions={name: version_of(name) for name in VERSIONS},
        there=[name for name in OPTIONAL if find_spec(name) is not None],
    )
    for command in PROGRAMS:
        show(command)
    show((sys.executable, "-m", "siirl_dask.cli", "doctor"))
    if not devices.ON_CPU and devices.count() == 0:
        sys.exit("torch can use no device here")


def _total_memory() -> int:
    return torch.get_device_module(str(devices.kind())).mem_get_info()[1]


if __name__ == "__main__":
    main()
