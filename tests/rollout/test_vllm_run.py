import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from tests.conftest import Finished, digits_overrides

PLACEMENTS = {
    "beside the policy": "{rollout: [0, 1], reward: [0, 1], policy: [0, 1]}",
    "on workers of its own": "{rollout: [0], reward: [0], policy: [1]}",
}
CASES = [
    pytest.param(placement, id=name, marks=() if name == "beside the policy" else pytest.mark.sweep)
    for name, placement in PLACEMENTS.items()
]
"""e2e/test_window.py has an engine on a worker of its own, and holds its weights to the bit."""


@pytest.mark.parametrize("placement", CASES)
def test_a_policy_learns_from_what_it_generates(digits_task, tmp_path, placement):
    overrides = [
        *digits_overrides(digits_task, tmp_path / "run"),
        "run.steps=7",
        "trainer.warmup_steps=0",
        "trainer.lr=4e-3",
        "cluster.workers=2",
        f"cluster.placement={placement}",
        "rollout.engine=vllm",
        "rollout.n=16",
        "rollout.vllm.kv_cache_memory=64MiB",
    ]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    file = load_config_file(shipped("quickstart.yaml"), overrides)
    finished = Finished(tmp_path / "run", run(file.config, *dags(file)))
    assert finished.summary.status == "complete"
    rewards = [record["metrics"]["reward/mean"] for record in finished.records()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    for step in (1, 7):
        for row in finished.table("rollouts", step).to_pylist():
            assert row["weights_version"] == step - 1
            assert row["old_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child.cmdline() for child in left if not _is_pythons_own(child)], "the run is over"


def _is_pythons_own(child):
    """Return whether Python itself started the process and keeps it: the fork server or the
    resource tracker.
    """
    command = " ".join(child.cmdline())
    forked_from = "forkserver" in command and child.ppid() == psutil.Process().pid
    return forked_from or "resource_tracker" in command
