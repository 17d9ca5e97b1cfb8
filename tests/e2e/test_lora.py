"""A policy that learns by adapters: its own reference, its weights synchronised by adapters
alone, gone on with.
"""

import shutil

import pytest
import yaml
from safetensors.torch import load_file, save_file

from siirl_dask.config.file import shipped

EXACT = ["row_id", "response_ids", "reward", "weights_version"]
REFERENCE = {
    "run": "siirl_dask.nodes:base_logprobs",
    "role": "policy",
    "after": "rollout",
    "rows": "balanced",
}
APART = REFERENCE | {"run": "siirl_dask.nodes:reference_logprobs", "role": "reference"}
JOINED = {"after": ["reward", "old_logprobs", "reference_logprobs"]}
WHOLE = {name: {"with": {"lora": None}} for name in ("weights", "load_weights")}
OWN = {"nodes": {"reference_logprobs": REFERENCE, "advantage": JOINED}}
SECOND_MODEL = {
    "roles": {
        "reference": {
            "build": "siirl_dask.training:build_reference",
            "with": {"model": "${model}", "trainer": "${trainer}", "rollout": "${rollout}"},
        }
    },
    "nodes": {"reference_logprobs": APART, "advantage": JOINED, **WHOLE},
}
LORA = [
    "trainer.lora.rank=8",
    "trainer.lora.alpha=16",
    "trainer.lr=3e-3",
    "algorithm.kl_coefficient=0.001",
]


@pytest.fixture
def start(train, digits_task, tmp_path):
    """Train like ``train``, with a model whose frozen head tells tokens apart: a random head gives
    all of them nearly the same probability, whatever its layers compute.
    """
    model = shutil.copytree(digits_task.model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 8
    save_file(weights, model / "model.safetensors", {"format": "pt"})

    def begin(name, changes, *overrides):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"base": str(shipped("quickstart.yaml")), **changes}))
        return train(name, f"model.path={model}", *LORA, *overrides, config_file=file)

    return begin


def test_adapters_learn_the_task(start):
    run = start("run", OWN, "run.steps=8", "rollout.n=16")
    rewards = [record["metrics"]["reward/mean"] for record in run.records()]
    assert sum(rewards[:2]) / 2 < 0.2
    assert sum(rewards[-2:]) / 2 > 0.5


@pytest.mark.slow
def test_adapters_equal_whole_weights_and_a_second_model_also_when_resumed(start):
    placed = (
        "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3], reference: [2, 3]}"
    )
    whole = start("whole", SECOND_MODEL, placed, "trainer.backend=fsdp")
    start("own", OWN, "run.steps=2", "checkpoint.every=2")
    own = start("own", OWN, "run.steps=3", "checkpoint.every=2")
    for step in (1, 2, 3):
        expected, got = whole.table("rollouts", step), own.table("rollouts", step)
        assert got.select(EXACT).equals(expected.select(EXACT)), step
        flat = [
            table["reference_logprobs"].combine_chunks().flatten().to_pylist()
            for table in (expected, got)
        ]
        assert flat[1] == pytest.approx(flat[0], abs=1e-6, rel=1e-6)
    for expected, got in zip(whole.records(), own.records(), strict=True):
        for metric in ("policy/loss", "policy/reference_kl", "policy/entropy"):
            assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], abs=1e-5), (
                metric
            )
    moved = [run.records()[0]["metrics"]["bytes/peers"] for run in (whole, own)]
    # to two workers that generate: 91k parameters in float32, or 22k of adapters
    assert moved[1] < moved[0] - 200_000
