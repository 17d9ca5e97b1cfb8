"""FSDP2 on 1, 2 and 4 ranks against a single process that holds the whole model."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import ConfigError
from siirl_dask.models.shapes import count_parameters
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import LENGTHS, flat, load_state, random_rows, save_state, signs
from siirl_dask.training import TrainBatch, build_critic, build_reference, build_trainer
from siirl_dask.training.parallel.dtensor import full_tensor, local
from siirl_dask.training.parallel.mesh import role_mesh
from tests.conftest import digits_overrides
from tests.settings import trainer_config
from tests.training.roles import policy

CASES = {
    "2 ranks": (2, "tied", {}),
    "4 ranks, untied": (4, "untied", {}),
    "checkpointed": (2, "tied", {"gradient_checkpointing": True}),
    "2 replicas of 2 shards": (4, "tied", {"shard_size": 2}),
    "offloaded": (2, "untied", {"offload": True}),
    "gathered as one": (2, "untied", {"gather_size": "64MiB"}),
    "both layers together": (4, "tied", {"gather_size": "64KiB", "gradient_checkpointing": True}),
    "experts": (2, "experts", {}),
    "bfloat16": (2, "tied", {"dtype": Dtype.bfloat16}),
}
EXACT = [name for name in CASES if name != "bfloat16"]
MOVES = (("2 ranks", "2 replicas of 2 shards"), ("2 replicas of 2 shards", "2 ranks"))
SETTINGS = {
    "lr": 1e-4,
    "eps": 1e-6,
    "max_grad_norm": 1e6,
    "max_tokens_per_micro_batch": 24,
    "gather_size": "0B",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny_model(
            root / name,
            seed=1,
            hidden=36,
            heads=3,
            head_dim=12,
            tied=name == "tied",
            family="qwen3_moe" if name == "experts" else "qwen3",
        )
        for name in ("tied", "untied", "experts")
    }


@pytest.fixture(scope="module")
def alone(folders):
    results = {}
    for name, folder in folders.items():
        trainer = policy(folder, config(), temperature=0.7)
        results[name] = learn(trainer, Rank()) | {"next": advance(trainer, Rank(), 3)}
    return results


@pytest.fixture(scope="module")
def seen(folders, tmp_path_factory):
    return run_ranks(
        4,
        partial(in_each_rank, folders, tmp_path_factory.mktemp("states")),
        tmp_path_factory.mktemp("ranks"),
    )


def config(**settings):
    return trainer_config(**SETTINGS | settings)


def in_each_rank(folders, root, world):
    # an in-place change of a result that is a view loses FSDP's hook, and gradients with it
    warnings.filterwarnings("error", "FSDP2-wrapped module .* returned a view")
    pair = dist.new_group([0, 1])
    results, trained = {}, {}
    for name, (size, model, settings) in CASES.items():
        if world.rank < size:
            rank = Rank(world.rank, size, pair if size == 2 else world.group)
            options = dict(settings)
            dtype = options.pop("dtype", Dtype.float32)
            sharded = config(backend="fsdp", **options)
            trainer = policy(folders[model], sharded, temperature=0.7, rank=rank, dtype=dtype)
            results[name] = learn(trainer, rank)
            trained[name] = trainer, rank
    results["resumed"] = resumed(trained, root)
    return results


def resumed(trained, root):
    """Resume in one layout what another trained. Returns the weights and the metrics of the next
    update.
    """
    for old, _ in MOVES:
        if old in trained:
            trainer, rank = trained[old]
            save_state(trainer, root / old, rank)
    dist.barrier()  # else one of two ranks could load before four have saved
    results = {}
    for old, new in MOVES:
        if new in trained:
            trainer, rank = trained[new]
            load_state(trainer, root / old, rank)
            results[f"{old} to {new}"] = copied(trainer), advance(trainer, rank, 3)
    return results


def learn(trainer, rank):
    """Take three updates. Rank 0 has most rows, the last of four has none."""
    seen = {"metrics": []}
    for at in range(3):
        seen["metrics"].append(advance(trainer, rank, at))
        if at == 0:
            named = trainer._network.by_name()
            seen["gradients"] = {
                name: full_tensor(parameter.grad).clone() for name, parameter in named.items()
            }
    seen["weights"] = copied(trainer)
    seen["held"] = sum(local(tensor).numel() for tensor in flat(trainer.state()).values())
    return seen


def copied(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def advance(trainer, rank, at):
    batch = own_batch(trainer, rank, LENGTHS[at:])
    return trainer.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))


def own_batch(trainer, rank, lengths):
    ends = (
        [round(len(lengths) * part) for part in (0, 0.6, 1, 1, 1)]
        if rank.size > 1
        else [0, len(lengths)]
    )
    rows = random_rows(lengths, range(ends[rank.rank], ends[rank.rank + 1]))
    logprobs = trainer.logprobs(rows).logprobs
    return TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )


@pytest.mark.parametrize("name", EXACT)
def test_a_sharded_policy_learns_like_a_single_process(name, seen, alone):
    size, model, _ = CASES[name]
    for rank in range(size):
        result, expected = seen[rank][name], alone[model]
        for metrics, theirs in zip(result["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(theirs, abs=1e-6, rel=1e-6)
        assert list(result["weights"]) == list(expected["weights"])
        for key, gradient in expected["gradients"].items():
            assert_close(result["gradients"][key], gradient, atol=1e-6, rtol=0)
            assert_close(result["weights"][key], expected["weights"][key], atol=1e-4, rtol=0)


def test_a_rank_holds_only_its_shard_of_weights_and_moments(seen, alone):
    for name, parts in {"2 ranks": 2, "4 ranks, untied": 4, "2 replicas of 2 shards": 2}.items():
        size, model, _ = CASES[name]
        for rank in range(size):
            assert seen[rank][name]["held"] < 1.1 * alone[model]["held"] / parts


def test_training_resumes_in_another_layout(seen, alone):
    for rank in range(4):
        for name, (weights, metrics) in seen[rank]["resumed"].items():
            assert metrics == pytest.approx(alone["tied"]["next"], abs=1e-6, rel=1e-6), name
            for key, weight in alone["tied"]["weights"].items():
                assert_close(weights[key], weight, atol=1e-4, rtol=0)


def test_bfloat16_gathers_in_bfloat16_and_learns_in_float32(seen, alone):
    for rank in range(2):
        result = seen[rank]["bfloat16"]
        assert {weight.dtype for weight in result["weights"].values()} == {torch.bfloat16}
        assert {gradient.dtype for gradient in result["gradients"].values()} == {torch.float32}
        assert result["metrics"][0]["grad_norm"] == pytest.approx(
            alone["tied"]["metrics"][0]["grad_norm"], rel=0.05
        )


@pytest.mark.parametrize("make", [build_trainer, build_reference, build_critic])
def test_the_config_selects_the_backend(folders, make):
    arguments = {"model": ModelConfig(path=str(folders["tied"])), "trainer": config(backend="fsdp")}
    if make is not build_critic:
        arguments["rollout"] = RolloutConfig()
    built = make(Device("w0"), Rank(), **arguments)
    assert all(isinstance(tensor, DTensor) for tensor in built.state()["model"].values())
    replicated = make(Device("w0"), Rank(), **arguments | {"trainer": config()})
    rows = random_rows(LENGTHS)
    scores = [
        it.values(rows) if make is build_critic else it.logprobs(rows).logprobs
        for it in (built, replicated)
    ]
    assert_close(*scores, atol=1e-6, rtol=0)


def test_the_planned_memory_is_a_workers_shard(digits_task):
    learns = 16, {}
    averages = 20, {"trainer.ema_decay": 0.9}
    parameters = count_parameters(str(digits_task.model))
    for each, options in (learns, averages):
        for backend, expected in (
            ("torch", each * parameters.total),
            (
                "fsdp",
                each * parameters.total // 2 + 16 * parameters.largest + 2 * 4 * parameters.total,
            ),
        ):
            changes = {"trainer.backend": backend, **options}
            overrides = [
                *digits_overrides(digits_task, "run"),
                *(f"{key}={value}" for key, value in changes.items()),
            ]
            file = load_config_file(shipped("quickstart"), overrides)
            phases = plan_phases(file.config, *dags(file), worker_names(file.config))
            held = {
                role: size
                for memory in check(file.config, phases).memory
                for role, size in memory.roles.items()
            }
            assert held["policy"] == expected, changes


def test_a_shard_size_that_does_not_divide_the_role_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"trainer\.fsdp\.shard_size=2: expected a divisor of the role's 3 workers",
    ):
        role_mesh(Rank(0, 3), 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="process group of its 3 ranks"):
        role_mesh(Rank(0, 3), None, torch.device("cpu"))


def test_weights_missing_from_the_folder_are_named(tmp_path):
    folder = tiny_model(tmp_path / "model", tied=False)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"its \*\.safetensors lack \['lm_head\.weight'\]"):
        policy(folder, config(backend="fsdp"))


def test_a_second_run_on_the_same_ranks_gathers_by_its_own_groups(folders, tmp_path):
    run_ranks(2, partial(run_twice, next(iter(folders.values()))), tmp_path)


def run_twice(folder, rank):
    for number in range(2):
        group = dist.new_group([0, 1])
        trainer = build_trainer(
            Device("w0"), Rank(rank.rank, 2, group), model=ModelConfig(path=str(folder)),
            trainer=TrainerConfig(backend="fsdp"), rollout=RolloutConfig(),
        )  # fmt: skip
        assert sum(tensor.numel() for _, tensor in trainer.weights()), number
        dist.destroy_process_group(group)
    return []
