"""megatron-core on 1 to 4 ranks, as stages and parts of layers, against a single process that
holds the whole model.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from siirl_dask.algorithms import TokenLoss, ppo_clip
from siirl_dask.config import Backend, Dtype
from siirl_dask.context import Rank
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import LENGTHS, signs
from siirl_dask.training import TrainBatch, ValueBatch
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
from tests.training.roles import critic, policy

# four processes, maybe beside four others, on two cores
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip(
    "megatron.core", reason="needs megatron-core: pip install 'siirl_dask[megatron]'"
)
CASES = {  # tensor and pipeline parallel, ranks, model, settings
    "1 x 1, 2 replicas": (1, 1, 2, "tied", {}),
    "2 x 1": (2, 1, 2, "tied", {}),
    "1 x 2": (1, 2, 2, "tied", {}),
    "1 x 2, untied": (1, 2, 2, "untied", {}),
    "2 x 2": (2, 2, 4, "tied", {}),
    "2 x 2, untied": (2, 2, 4, "untied", {"gradient_checkpointing": True}),
    "2 x 1, 2 replicas": (2, 1, 4, "untied", {}),
    "1 x 2, 2 replicas": (1, 2, 4, "tied", {}),
    "1 x 4": (1, 4, 4, "tied", {}),
    "2 x 1, tokens split": (2, 1, 2, "tied", {"tokens": True}),
    "2 x 2, tokens split": (2, 2, 4, "untied", {"tokens": True, "gradient_checkpointing": True}),
    "2 replicas, state divided": (1, 1, 2, "tied", {"divided": True}),
    "2 x 1, 2 replicas, state divided": (2, 1, 4, "untied", {"divided": True}),
    "1 x 2, 2 replicas, state divided": (1, 2, 4, "tied", {"divided": True}),
    "context 2": (1, 1, 2, "tied", {"context": 2}),
    "context 4": (1, 1, 4, "tied", {"context": 4}),
    "2 x 1, context 2": (2, 1, 4, "untied", {"context": 2}),
    "2 x 1, context 2, tokens split": (2, 1, 4, "tied", {"context": 2, "tokens": True}),
    "1 x 2, context 2": (1, 2, 4, "tied", {"context": 2, "gradient_checkpointing": True}),
    "context 2, 2 replicas, state divided": (1, 1, 4, "untied", {"context": 2, "divided": True}),
    "1 x 2, two chunks": (1, 2, 2, "tied", {"chunks": 2}),
    "2 x 2, two chunks, tokens split": (
        2,
        2,
        4,
        "untied",
        {"chunks": 2, "tokens": True, "gradient_checkpointing": True},
    ),
    "1 x 2, two chunks, context 2": (
        1,
        2,
        4,
        "tied",
        {"chunks": 2, "context": 2, "gradient_checkpointing": True},
    ),
    "1 x 2, two chunks, 2 replicas": (1, 2, 4, "untied", {"chunks": 2, "divided": True}),
    "2 x 2, bfloat16": (2, 2, 4, "tied", {"dtype": Dtype.bfloat16}),
    "fsdp": (1, 1, 2, "tied", {"backend": Backend.fsdp}),
}
CRITICS = {
    "critic": (2, 2, {}),
    "critic, tokens split": (2, 2, {"tokens": True}),
    "critic, context 2": (1, 2, {"context": 2}),
    "critic, two chunks": (2, 2, {"chunks": 2}),
}
MORE = {*CASES, *CRITICS} - {
    "2 x 1",
    "2 x 2",
    "context 2",
    "2 x 1, context 2",
    "1 x 2, 2 replicas",
    "1 x 2, 2 replicas, state divided",
    "1 x 2, two chunks",
    "2 x 2, two chunks, tokens split",
    "2 x 2, bfloat16",
    "fsdp",
    "critic, two chunks",
}
"""Layouts that are left to ``make sweep``: the others have each of their parts, most of them
together with another."""
SKIPPED = ("2 x 2", "2 x 1, context 2", "2 x 2, two chunks, tokens split")
PAIRS = ("2 x 1", "context 2")
"""Layouts of two ranks: each computes all tokens, and half of them."""
EXACT = [name for name in CASES if name not in ("2 x 2, bfloat16", "fsdp")]
MOVES = (
    ("2 x 2", "1 x 2"),
    ("1 x 2", "2 x 2"),
    ("2 x 1", "fsdp"),
    ("fsdp", "2 x 2"),
    ("1 x 4", "1 x 1, 2 replicas"),
    ("1 x 2, 2 replicas, state divided", "2 x 1"),
    ("2 x 1", "1 x 2, 2 replicas, state divided"),
    ("2 replicas, state divided", "fsdp"),
    ("1 x 2, context 2", "2 x 1"),
    ("2 x 2", "context 2"),
    ("1 x 2, two chunks", "2 x 1"),
    ("fsdp", "1 x 2, two chunks, context 2"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny_model(
            root / name, seed=1, hidden=32, heads=4, kv_heads=2, head_dim=8, layers=4, tied=name == "tied",
            family="qwen3" if name == "tied" else "qwen2",
        )
        for name in ("tied", "untied")
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(folders):
    results = {}
    for name, folder in folders.items():
        trainer = policy(folder, trainer_config(**SETTINGS), temperature=0.7)
        results[name] = learn(trainer, Rank()) | {"next": advance(trainer, Rank(), 3)}
    results["critic"] = learn_values(critic(folders["tied"], trainer_config(**SETTINGS)), Rank())
    return results


def in_each_rank(folders, root, left, world):
    pair, beside = dist.new_group([0, 1]), dist.new_group([0, 1])
    results, trained = {}, {}
    for name, (tensor, pipeline, size, model, settings) in CASES.items():
        if world.rank < size and name not in left:
            rank = Rank(world.rank, size, pair, beside) if size == 2 else world
            trainer = policy(
                folders[model], config_of(tensor, pipeline, **settings), temperature=0.7, rank=rank,
                dtype=settings.get("dtype", Dtype.float32),
            )  # fmt: skip
            results[name] = learn(trainer, rank)
            trained[name] = trainer, rank
    for name, (tensor, pipeline, settings) in CRITICS.items():
        if name not in left:
            values = critic(
                folders["tied"],
                config_of(tensor, pipeline, **settings),
                Rank(world.rank, 4, world.group),
            )
            results[name] = learn_values(values, world)
    results["tokens"] = {
        name: tokens_of_a_pass(*trained[name]) for name in PAIRS if name in trained
    }
    results["skipped"] = {name: skipped(*trained[name]) for name in SKIPPED}
    results["resumed"] = resumed(trained, MOVES, root, left)
    return results


sample, every, seen, seen_of = fixtures_of(in_each_rank, MORE)


def tokens_of_a_pass(trainer, rank):
    """Return the tokens that this rank's first layer computes of all rows."""
    seen = []
    layer = trainer._replica.stage.layers()[0]
    hook = layer.register_forward_hook(lambda _, given, output: seen.append(len(output[0])))
    trainer.logprobs(own_rows(rank, LENGTHS))
    hook.remove()
    return sum(seen)


def learn_values(critic, rank):
    rows, metrics = own_rows(rank, LENGTHS), []
    for _ in range(2):
        batch = ValueBatch(rows=rows, old_values=critic.values(rows), returns=signs(rows))
        metrics.append(
            critic.update([batch], lambda it: TokenLoss(loss=(it.values - it.returns).square()))
        )
    return {"metrics": metrics, "values": critic.values(rows), "weights": copied(critic)}


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
def test_a_divided_policy_learns_like_a_single_process(name, seen_of, alone):
    _, _, size, model, _ = CASES[name]
    assert_learned(name, size, seen_of, alone[model])


def test_a_rank_holds_its_part_of_weights_and_moments(seen, alone):
    for name, parts in {"2 x 1": 2, "2 x 2": 4, "1 x 4": 4, "2 x 2, untied": 4}.items():
        if name not in seen[0]:
            continue
        held = [seen[rank][name]["held"] for rank in range(CASES[name][2])]
        whole = alone[CASES[name][3]]["held"]
        embeddings = 264 * 32 * 4  # and their moments and average, which the last stage has as well
        assert max(held) < 1.1 * whole / parts + embeddings
        assert sum(held) < 1.1 * whole + embeddings


def test_ranks_that_share_tokens_compute_an_equal_part_each(seen):
    whole, part = ([seen[rank]["tokens"][name] for rank in range(2)] for name in PAIRS)
    tokens = sum(map(sum, LENGTHS))
    assert whole == [tokens] * 2
    assert part[0] == part[1]
    assert tokens <= 2 * part[0] <= tokens + len(LENGTHS), (
        "a micro-batch is filled up by one token at most"
    )


@pytest.mark.parametrize(
    "name", sampled(["1 x 1, 2 replicas", "2 x 1, 2 replicas", "1 x 2, 2 replicas"], MORE)
)
def test_replicas_that_divide_the_state_hold_it_once_and_give_the_same_to_the_bit(name, seen_of):
    size, divided = CASES[name][2], f"{name.removeprefix('1 x 1, ')}, state divided"
    for rank in range(size):
        whole, shared = seen_of[rank][name], seen_of[rank][divided]
        assert whole["metrics"] == shared["metrics"]
        for kind in ("weights", "averages"):
            assert all(
                torch.equal(shared[kind][key], weight) for key, weight in whole[kind].items()
            )
    held = {one: sum(seen_of[rank][one]["held"] for rank in range(size)) for one in (name, divided)}
    of_state = 3 / 4  # moments and average, beside the weights
    assert held[divided] == pytest.approx((1 - of_state / 2) * held[name], rel=0.01)
    most = max(seen_of[rank][divided]["held"] for rank in range(size))
    assert most < 0.72 * held[name] / size, "about an even share"


def test_training_resumes_in_another_layout_and_backend(seen, alone):
    for rank in range(4):
        for name, (weights, metrics) in seen[rank]["resumed"].items():
            assert metrics == pytest.approx(alone["tied"]["next"], abs=2e-6, rel=2e-6), name
            for key, weight in alone["tied"]["weights"].items():
                assert_close(weights[key], weight, atol=1e-4, rtol=0)


def test_bfloat16_computes_in_bfloat16_and_learns_in_float32(seen, alone):
    for rank in range(4):
        result = seen[rank]["2 x 2, bfloat16"]
        assert {weight.dtype for weight in result["weights"].values()} == {torch.bfloat16}
        norms = [each["metrics"][0]["grad_norm"] for each in (result, alone["tied"])]
        assert norms[0] == pytest.approx(norms[1], rel=0.05)
        assert_close(result["logprobs"], seen[rank]["2 x 2"]["logprobs"], atol=0.07, rtol=0)


@pytest.mark.parametrize("name", sampled(CRITICS, MORE))
def test_a_divided_critic_learns_like_a_single_process(name, seen_of, alone):
    expected = alone["critic"]
    for rank in range(4):
        result = seen_of[rank][name]
        for metrics, theirs in zip(result["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(theirs, abs=2e-6, rel=2e-6)
        for key, weight in expected["weights"].items():
            assert_close(result["weights"][key], weight, atol=1e-4, rtol=0)
    assert_close(
        torch.cat([seen_of[rank][name]["values"] for rank in range(4)]),
        expected["values"],
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("name", SKIPPED)
def test_rows_that_are_not_finite_are_named_on_the_rank_that_has_them(name, seen):
    found = [seen[rank]["skipped"][name] for rank in range(4)]
    rows = [at for _, at, _ in found]
    assert rows[0] == rows[2] == rows[3] == {}
    assert set(rows[1]) == {"advantages", "loss"}
    assert all(steps == 1 and same for steps, _, same in found)
