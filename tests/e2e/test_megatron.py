"""A whole run whose policy is in stages and parts of layers learns what one learns that is whole
on each worker.
"""

import pytest

from siirl_dask.config.file import shipped
from siirl_dask.tasks.tiny_model import tiny_model

pytest.importorskip(
    "megatron.core", reason="needs megatron-core: pip install 'siirl_dask[megatron]'"
)
pytestmark = pytest.mark.slow
APART = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3], reference: [2, 3]}"
CASES = {  # family of the model, options
    "tensor": ("qwen3", ["trainer.megatron.tensor_parallel=2"]),
    "stages": ("qwen3", ["trainer.megatron.pipeline_parallel=2"]),
    "context": ("qwen3", ["trainer.megatron.context_parallel=2"]),
    "chunks": (
        "qwen3",
        ["trainer.megatron.pipeline_parallel=2", "trainer.megatron.virtual_pipeline=2"],
    ),
    "experts": ("qwen3_moe", ["trainer.megatron.expert_parallel=2"]),
    "routes": ("qwen3_moe", ["trainer.megatron.expert_parallel=2"]),
}


# chunks are stages as well, and routes those of experts
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.sweep] * (case not in ("chunks", "routes")))
        for case in CASES
    ],
)
def test_a_divided_policy_beside_engines_learns_as_a_whole_one_does(train, tmp_path, case):
    family, layout = CASES[case]
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 4}
    config, model = shipped("grpo_kl"), tiny_model(tmp_path / "model", family=family, **sizes)
    replay = f"rollout.router_replay={case == 'routes'}"
    options = [APART, replay, f"model.path={model}", "cluster.workers=4"]
    whole = train("whole", *options, config_file=config)
    divided = train("divided", *options, "trainer.backend=megatron", *layout, config_file=config)
    for expected, got in zip(whole.records(), divided.records(), strict=True):
        for metric in ("policy/loss", "policy/entropy", "reward/mean"):
            assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], abs=1e-4), (
                metric
            )
