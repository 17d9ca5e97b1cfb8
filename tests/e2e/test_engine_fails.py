"""An engine that cannot be built ends the run with one error that says what and where, and
leaves no process behind.
"""

import contextlib
import os
from importlib.util import find_spec

import psutil
import pytest

from siirl_dask.tasks.tiny_model import tiny_model

NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
VLLM = ("rollout.engine=vllm", "rollout.vllm.kv_cache_memory=1MiB")


def of_session(leader):
    """Processes of the session that it began, whoever their parent is by now."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                yield process


def a_cache_that_is_too_small(folder):
    """8 KiB a token."""
    model = tiny_model(folder / "wide", layers=8, kv_heads=2, head_dim=64)
    return [*VLLM, f"model.path={model}", "rollout.vllm.engine_kwargs={max_model_len: 1024}"]


def weights_that_are_missing(folder):
    model = tiny_model(folder / "empty")
    (model / "model.safetensors").unlink()
    return [f"model.path={model}"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param(
            a_cache_that_is_too_small,
            "rollout.vllm.kv_cache_memory=1MiB",
            marks=[NEEDS_VLLM, pytest.mark.sweep],
        ),
        pytest.param(weights_that_are_missing, "model.path=", marks=pytest.mark.slow),
    ],
)
def test_it_is_one_error_by_name_and_no_process_is_left(start, tmp_path, wrong, said):
    run = start("cluster.workers=1", "cluster.placement={}", *wrong(tmp_path))
    _, out, err = run.end(timeout=120)
    _, left = psutil.wait_procs([*of_session(run.process.pid)], timeout=3 * run.slowdown)
    assert not left
    assert run.process.returncode == 2
    assert err.startswith("error: ")
    assert said in err
    assert "role 'rollout', worker '0'" in err
    assert (err.count("error: "), out) == (1, "")
    assert "Traceback" not in err
    assert not run.url.exists()
