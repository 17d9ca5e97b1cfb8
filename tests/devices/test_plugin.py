"""A plug-in of torch's that cannot be imported is said in one line, before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_CANN = Path(__file__).parent / "without_cann"
SAID = (
    "torch cannot be imported, since its plug-in torch_npu fails: ImportError: libhccl.so: cannot "
    "open shared object file: No such file or directory; source CANN's set_env.sh, or set "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to compute without it"
)


def with_torch_npu(*command, **variables):
    """Run Python in a process in which torch-npu is installed and CANN is not."""
    kept = {
        name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"
    }
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, "PYTHONPATH": str(WITHOUT_CANN), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_without_cann_a_run_says_so_in_one_line_before_anything_starts(tmp_path):
    done = with_torch_npu(
        "-m", "siirl_dask.cli", "run", "configs/quickstart.yaml", f"run.url={tmp_path / 'run'}"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {SAID}\n")
    assert not (tmp_path / "run").exists()


def test_without_cann_a_script_and_the_doctor_say_the_same():
    script = with_torch_npu("-c", "from siirl_dask import grpo")
    assert script.stderr.splitlines()[-1] == f"siirl_dask.errors.ConfigError: {SAID}"
    doctor = (
        "from siirl_dask.driver.doctor.devices import check_plugin; [f] = check_plugin(); "
        "print(f.text, f.cure)"
    )
    assert with_torch_npu("-c", doctor).stdout.strip() == SAID.replace(";", "")


def test_where_torch_loads_no_plugins_it_computes_on_cpus():
    code = "from siirl_dask.devices import check_plugins; check_plugins()"
    code += (
        "; from siirl_dask.devices.accelerator import visible_devices; "
        "print(visible_devices().kind)"
    )
    assert with_torch_npu("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout == "cpu\n"


@pytest.mark.parametrize("command", ["rollouts", "check"])
def test_commands_that_compute_nothing_need_no_plugin(command, tmp_path):
    done = with_torch_npu("-m", "siirl_dask.cli", command, str(tmp_path))
    assert "torch" not in done.stderr
