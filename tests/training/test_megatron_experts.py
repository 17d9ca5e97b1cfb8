"""Mixtures of experts with megatron-core: experts spread over ranks learn like a single process
that has them all.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Backend, Dtype
from siirl_dask.context import Rank
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import LENGTHS, signs
from siirl_dask.training import TrainBatch
from tests.settings import trainer_config
from tests.training.dividing import (
    SETTINGS,
    advance,
    assert_learned,
    config_of,
    copied,
    fixtures_of,
    learn,
    own_rows,
    resumed,
    sampled,
)
from tests.training.roles import policy
from tests.training.routes import routed

# four processes, maybe beside four others, on two cores
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip(
    "megatron.core", reason="needs megatron-core: pip install 'siirl_dask[megatron]'"
)
CASES = {  # tensor and pipeline parallel, ranks of experts, ranks, model, settings
    "1 x 1, 2 replicas": (1, 1, None, 2, "all", {}),
    "2 x 1": (2, 1, None, 2, "all", {}),
    "2 x 1, experts whole": (2, 1, 1, 2, "all", {}),
    "1 x 2": (1, 2, None, 2, "all", {}),
    "1 x 2, some": (1, 2, None, 2, "some", {}),
    "2 x 2": (2, 2, None, 4, "all", {}),
    "2 x 2, some": (2, 2, None, 4, "some", {"gradient_checkpointing": True}),
    "2 x 1, 2 replicas": (2, 1, None, 4, "all", {}),
    "over 2 replicas": (1, 1, 2, 2, "all", {}),
    "over 2 of 4 replicas, some": (1, 1, 2, 4, "some", {"gradient_checkpointing": True}),
    "over 4 replicas": (1, 1, 4, 4, "all", {}),
    "2 x 1, over 2 replicas": (2, 1, 4, 4, "all", {}),
    "1 x 2, over 2 replicas": (1, 2, 2, 4, "some", {}),
    "2 x 1, tokens split": (2, 1, None, 2, "all", {"tokens": True}),
    "2 x 1, tokens split, over 2 replicas": (2, 1, 4, 4, "some", {"tokens": True}),
    "over 2 of 4 replicas, state divided": (1, 1, 2, 4, "all", {"divided": True}),
    "2 x 1, 2 replicas, state divided": (2, 1, None, 4, "all", {"divided": True}),
    "context 2, experts whole": (1, 1, 1, 2, "some", {"context": 2}),
    "context 2, over its ranks": (1, 1, 2, 2, "all", {"context": 2}),
    "context 2, over 2 replicas": (1, 1, 4, 4, "all", {"context": 2, "divided": True}),
    "2 x 1, context 2, over a replica": (
        2,
        1,
        4,
        4,
        "some",
        {"context": 2, "gradient_checkpointing": True},
    ),
    "1 x 2, two chunks, over 2 replicas": (1, 2, 2, 4, "some", {"chunks": 2}),
    "over 2 replicas, bfloat16": (1, 1, 2, 2, "all", {"dtype": Dtype.bfloat16}),
    "fsdp": (1, 1, None, 2, "all", {"backend": Backend.fsdp}),
}
# tensor and pipeline parallel, ranks of experts, ranks, settings; of the model whose layers have
# them all
REPLAYED = {
    "2 x 1": (2, 1, None, 2, {}),
    "2 x 1, tokens split, over 2 replicas": (
        2,
        1,
        4,
        4,
        {"tokens": True, "gradient_checkpointing": True},
    ),
    "1 x 2, two chunks": (1, 2, None, 2, {"chunks": 2}),
    "1 x 2, context 2, over its ranks": (
        1,
        2,
        2,
        4,
        {"context": 2, "gradient_checkpointing": True},
    ),
    "some, 1 x 2": (1, 2, None, 2, {}),
}
MORE = {*CASES, *(f"replayed, {name}" for name in REPLAYED)} - {
    "2 x 1",
    "over 2 replicas",
    "2 x 1, over 2 replicas",
    "over 2 of 4 replicas, state divided",
    "context 2, over 2 replicas",
    "1 x 2, two chunks, over 2 replicas",
    "over 2 replicas, bfloat16",
    "fsdp",
    "replayed, 2 x 1, tokens split, over 2 replicas",
    "replayed, 1 x 2, two chunks",
    "replayed, 1 x 2, context 2, over its ranks",
}
"""Layouts that are left to ``make sweep``: the others have each of their parts, most of them
together with another."""
SKIPPED = (
    "over 4 replicas",
    "2 x 1, over 2 replicas",
    "1 x 2, over 2 replicas",
    "context 2, over 2 replicas",
)
EXACT = [name for name in CASES if name not in ("over 2 replicas, bfloat16", "fsdp")]
MOVES = (
    ("2 x 2", "over 2 replicas"),
    ("over 4 replicas", "2 x 1"),
    ("over 2 replicas", "fsdp"),
    ("fsdp", "2 x 1, over 2 replicas"),
    ("over 2 of 4 replicas, state divided", "1 x 2"),
    ("1 x 2", "over 2 of 4 replicas, state divided"),
    ("context 2, over 2 replicas", "over 2 replicas"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    sizes = {
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "layers": 4,
        "family": "qwen3_moe",
    }
    for name in ("all", "some"):
        tiny_model(root / name, seed=1, tied=name == "some", **sizes)
    config = AutoConfig.from_pretrained(root / "some")
    config.mlp_only_layers, config.norm_topk_prob, config.num_experts_per_tok = [1], False, 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / "some")
    return {name: root / name for name in ("all", "some")}


@pytest.fixture(scope="module")
def alone(folders):
    results = {}
    for name, folder in folders.items():
        trainer = policy(folder, trainer_config(**SETTINGS), temperature=0.7)
        results[name] = learn(trainer, Rank()) | {"next": advance(trainer, Rank(), 3)}
        trainer = policy(folder, trainer_config(**SETTINGS), temperature=0.7, replay=True)
        results[f"replayed, {name}"] = learn(trainer, Rank(), routes_of(name))
    return results


def in_each_rank(folders, root, left, world):
    pair, beside = dist.new_group([0, 1]), dist.new_group([0, 1])
    results, trained = {}, {}
    for name, (tensor, pipeline, experts, size, model, settings) in CASES.items():
        if world.rank < size and name not in left:
            rank = Rank(world.rank, size, pair, beside) if size == 2 else world
            trainer = policy(
                folders[model], config_of(tensor, pipeline, experts=experts, **settings), temperature=0.7, rank=rank,
                dtype=settings.get("dtype", Dtype.float32),
            )  # fmt: skip
            results[name] = learn(trainer, rank)
            trained[name] = trainer, rank
    for name, (tensor, pipeline, experts, size, settings) in REPLAYED.items():
        if world.rank < size and f"replayed, {name}" not in left:
            rank = Rank(world.rank, size, pair, beside) if size == 2 else world
            model = folders["some" if name.startswith("some") else "all"]
            config = config_of(tensor, pipeline, experts=experts, **settings)
            trainer = policy(model, config, temperature=0.7, rank=rank, replay=True)
            results[f"replayed, {name}"] = learn(trainer, rank, routes_of(name))
    results["skipped"] = {name: skipped(*trained[name]) for name in SKIPPED if name not in left}
    results["resumed"] = resumed(trained, MOVES, root, left)
    return results


sample, every, seen, seen_of = fixtures_of(in_each_rank, MORE)


def routes_of(name):
    layers, chosen = (3, 3) if name.startswith("some") else (4, 2)
    return partial(routed, layers=layers, experts=4, chosen=chosen)


def skipped(trainer, rank):
    """Leave out a step because of a number of rank 1's second row."""
    rows, found, before = own_rows(rank, LENGTHS), [], copied(trainer)
    advantages = signs(rows)
    if rank.rank == 1:
        advantages[1:] = float("nan")
    zeros = torch.zeros_like(advantages)
    batch = TrainBatch(rows=rows, old_logprobs=zeros, rollout_logprobs=zeros, advantages=advantages)
    metrics = trainer.update(
        [batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2), on_nonfinite=found.append
    )
    same = all(torch.equal(before[name], each) for name, each in trainer.weights())
    return metrics["skipped_steps"], {name: [*at] for name, at in found[0].rows.items()}, same


@pytest.mark.parametrize("name", sampled(EXACT, MORE))
def test_spread_experts_learn_like_a_single_process(name, seen_of, alone):
    _, _, _, size, model, _ = CASES[name]
    assert_learned(name, size, seen_of, alone[model])


@pytest.mark.parametrize("name", sampled([f"replayed, {name}" for name in REPLAYED], MORE))
def test_spread_experts_replay_routes_like_a_single_process(name, seen_of, alone):
    layout = name.removeprefix("replayed, ")
    model = "some" if layout.startswith("some") else "all"
    assert_learned(name, REPLAYED[layout][3], seen_of, alone[f"replayed, {model}"])
    apart = alone[model]["logprobs"] - alone[f"replayed, {model}"]["logprobs"]
    assert apart.abs().max() > 1e-3, "the routes change nothing"


def test_a_rank_holds_its_part_of_the_experts(seen, alone):
    whole, experts = alone["all"]["held"], sum(
        weight.numel() for name, weight in alone["all"]["weights"].items() if ".experts." in name
    )  # fmt: skip
    for name, parts in {
        "2 x 1": 2,
        "2 x 1, experts whole": 1,
        "over 2 replicas": 2,
        "over 4 replicas": 4,
    }.items():
        if name not in seen[0]:
            continue
        dense = 2 if CASES[name][0] == 2 else 1
        expected = (
            whole - 4 * experts
        ) / dense + 4 * experts / parts  # weights, two moments and the average
        for rank in range(CASES[name][3]):
            assert seen[rank][name]["held"] == pytest.approx(expected, rel=0.02)


def test_training_resumes_with_experts_on_other_ranks_and_in_another_backend(seen, alone):
    for rank in range(4):
        for name, (weights, metrics) in seen[rank]["resumed"].items():
            assert metrics == pytest.approx(alone["all"]["next"], abs=2e-6, rel=2e-6), name
            for key, weight in alone["all"]["weights"].items():
                assert_close(weights[key], weight, atol=1e-4, rtol=0)


def test_bfloat16_computes_in_bfloat16_and_learns_in_float32(seen, alone):
    for rank in range(2):
        result = seen[rank]["over 2 replicas, bfloat16"]
        assert {weight.dtype for weight in result["weights"].values()} == {torch.bfloat16}
        norms = [each["metrics"][0]["grad_norm"] for each in (result, alone["all"])]
        assert norms[0] == pytest.approx(norms[1], rel=0.05)


def test_every_replica_leaves_a_step_out_and_the_rows_are_named_where_they_are(seen):
    for name in seen[0]["skipped"]:
        found = [seen[rank]["skipped"][name] for rank in range(4)]
        assert [rows for _, rows, _ in found if rows] == [found[1][1]]
        assert set(found[1][1]) == {"advantages", "loss"}
        assert all(steps == 1 and same for steps, _, same in found)
