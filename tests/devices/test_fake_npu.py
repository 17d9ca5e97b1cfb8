"""Runs on NPUs that are stood in for: ``tests/fake_npu`` is torch's plug-in in processes of
their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from siirl_dask.devices.cpus import given_cpus
from tests.devices.hosts import install, links, npu
from tests.settings import digits_overrides

ROOT = Path(__file__).resolve().parents[2]
PLACEMENT = "cluster.placement={rollout: [0], reward: [0], policy: [1, 2], reference: [1, 2]}"
EQUAL = ("row_id", "prompt", "response_ids", "reward", "advantage")


def python(*command, npus=4, **variables):
    """Run Python with NPUs; without, as this process does."""
    plugin = {
        "PYTHONPATH": f"{ROOT / 'tests' / 'fake_npu'}{os.pathsep}{ROOT}",
        "FAKE_NPU_COUNT": str(npus),
    }
    environment = {**os.environ, **(plugin if npus else {}), **variables}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True
    )


def test_roles_compute_on_npus_as_on_cpus():
    done = python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/fake_npu/npu_checks.py",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def train(task, url, *overrides, npus=0, **variables):
    given = [
        *digits_overrides(task, url),
        "cluster.workers=3",
        PLACEMENT,
        "checkpoint.every=1",
        *overrides,
    ]
    done = python(
        "-m", "siirl_dask.cli", "run", "configs/grpo_kl.yaml", *given, npus=npus, **variables
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def samples(url, step):
    return pq.read_table(url / "rollouts" / f"step={step:06d}").sort_by("row_id")


def shown(done):
    return " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_accelerators_computes_in_bfloat16_by_itself_and_records_it(digits_task, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    given = ["run.steps=1", "observe.progress=true"]
    begun = train(digits_task, tmp_path / "npu", *given, npus=4, FAKE_NPU_TAKEN=str(taken))
    assert "model.dtype=auto takes bfloat16: the workers have Ascend910B2" in shown(begun)
    assert OmegaConf.load(tmp_path / "npu" / "config.yaml").model.dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_run_on_npus_has_the_rows_of_one_on_cpus_and_resumes(digits_task, tmp_path):
    ours, theirs, counts = tmp_path / "npu", tmp_path / "cpu", tmp_path / "calls"
    telling = {"FAKE_NPU_CALLS": str(counts)}
    counts.mkdir()
    taken = [tmp_path / name for name in ("first", "second")]
    for folder in taken:
        folder.mkdir()
    one, other = ({**telling, "FAKE_NPU_TAKEN": str(folder)} for folder in taken)
    exact = ["run.steps=2", "model.dtype=float32", "profile.steps=[2]", "observe.progress=true"]
    begun = train(digits_task, ours, *exact, npus=4, **one)
    assert (
        shown(begun).count(
            "model.dtype=float32 on Ascend910B2: it multiplies 4 times as fast in bfloat16"
        )
        == 1
    )
    first = [json.loads(file.read_text()) for file in counts.iterdir()]
    resumed = train(digits_task, ours, "run.steps=3", "observe.progress=true", npus=4, **other)
    assert "model.dtype=auto takes float32: the run began with it" in shown(resumed)
    on_cpus = train(digits_task, theirs, "run.steps=3", "observe.progress=true")
    assert "model.dtype=auto takes float32: this machine has no accelerator" in shown(on_cpus)
    assert "it multiplies" not in shown(on_cpus)
    for step in (1, 2, 3):
        one, other = samples(ours, step), samples(theirs, step)
        for name in EQUAL:
            assert one[name].equals(other[name]), f"{name} of step {step}"
        for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs"):
            both = (np.concatenate(table[name].to_pylist()) for table in (one, other))
            np.testing.assert_allclose(*both, atol=1e-4)
    assert sorted((ours / "checkpoints").iterdir())
    assert [*(ours / "profile").rglob("*.json.gz")]
    total = {name: sum(each.get(name, 0) for each in first) for each in first for name in each}
    assert total["hccl.allreduce_"] > 0, "gradients are summed over hccl"
    assert total["hccl.broadcast_"] > 0, "weights go to the engine over hccl"
    assert total["profile.Level0"] > 0
    assert sum(each.get("set_device", 0) > 0 for each in first) == 3, "each worker binds a device"


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(given_cpus()) < 2, reason="needs two CPUs to be bound to one of them")
def test_workers_of_a_run_are_bound_and_their_rewards_are_not(digits_task, tmp_path):
    """Every worker says what its processes may use: a reward in a process of its own all that
    there is.
    """
    one, here = max(given_cpus()), len(given_cpus())
    (tmp_path / "topo").write_text(npu(links(64, lambda one, two: "HCCS"), [str(one)] * 64))
    install(tmp_path / "bin", "npu-smi", f"cat {tmp_path / 'topo'}")
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def cpus(prompt, response, answer, **extra):\n"
        "    parent = len(os.sched_getaffinity(os.getppid()))\n"
        "    return {'reward': len(os.sched_getaffinity(0)), 'parent': parent}\n"
    )
    variables = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    given = ["run.steps=1", f"rewards.function={tmp_path / 'mine.py'}:cpus", "rewards.processes=1"]
    for name, overrides, parent in (("near", [], 1), ("anywhere", ["cluster.affinity=none"], here)):
        (taken := tmp_path / f"{name}-taken").mkdir()
        train(
            digits_task,
            tmp_path / name,
            *given,
            *overrides,
            npus=4,
            **variables,
            FAKE_NPU_TAKEN=str(taken),
        )
        rows = samples(tmp_path / name, 1)
        assert {*rows["reward"].to_pylist()} == {float(here)}
        assert {part["parent"] for part in map(dict, rows["reward_parts"].to_pylist())} == {
            float(parent)
        }
