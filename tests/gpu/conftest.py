"""Tests for a machine with GPUs or NPUs: ``make test-gpu``, or ``pytest -m gpu tests/gpu``.

They need torch, transformers, pytest, pyarrow, fsspec, cloudpickle and psutil, and no installation
of this package. Whole runs and broadcasts need Dask, OmegaConf and Bokeh as well, and are skipped
where these are not there. ``@pytest.mark.gpu(devices=2, packages=["vllm"])`` says what a test
needs: where that is not there it is skipped, with a word. ``SIIRL_TEST_DEVICE=cpu`` runs them on
CPUs, over gloo in place of nccl.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GIVEN = [
    str(Path(place).absolute())
    for place in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if place
]
PLACES = list(dict.fromkeys([str(ROOT), str(ROOT / "storage"), *GIVEN]))
sys.path[:0] = [place for place in PLACES if place not in sys.path]
# of the processes that tests start, in any folder
os.environ["PYTHONPATH"] = os.pathsep.join(PLACES)
if os.environ.get("SIIRL_TEST_DEVICE") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ""

from siirl_dask.models.broken_imports import hide  # noqa: E402  # not before its place is known

hide()


def pytest_report_header(config):
    """Begin the log with what the tests run on, as the doctor sees it."""
    try:
        from siirl_dask.driver.doctor.devices import check_devices
        from siirl_dask.driver.doctor.packages import check_packages
    except ImportError as error:
        return [f"the doctor cannot come: {error}"]
    findings = [*check_packages(), *check_devices()]
    return [
        f"{each.state:<5} {each.part}: {each.text}{each.cure and '; '}{each.cure}"
        for each in findings
    ]


def pytest_runtest_setup(item):
    """Skip what this machine cannot run, before any fixture is set up."""
    marks = [mark.kwargs for mark in item.iter_markers("gpu")]
    packages = sorted({name for given in marks for name in given.get("packages", ())})
    if missing := [name for name in packages if find_spec(name) is None]:
        pytest.skip(
            f"it needs {', '.join(missing)}, which this Python does not have (make test-gpu "
            "WHEELS=folder)"
        )
    from tests.gpu.devices import count

    needed = max([1, *(given.get("devices", 1) for given in marks)])
    if "two_ranks" in item.fixturenames:
        needed = max(needed, getattr(item.cls, "devices_of_two_ranks", 1))
    if (there := count()) < needed:
        wanted = "a GPU or an NPU" if needed == 1 else f"{needed} GPUs or NPUs"
        pytest.skip(
            f"it needs {wanted} that torch can use, and there {'is' if there == 1 else 'are'} "
            f"{there or 'none'}"
        )


@pytest.fixture(autouse=True, scope="module")
def leave_groups():
    """Destroy the process group that FSDP makes even for one rank, since the next module may
    need its own.
    """
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def tell(capsys):
    """Print figures on the terminal, whether the test passes or not."""

    def tell(text):
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    return tell
