"""Sequence and tensor parallelism against a single process, and the memory of long rows."""

import json
import resource
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from siirl_dask.algorithms import gmpo, policy_loss, sequence_mean_token_mean, value_clip
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models.shapes import count_parameters
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import (
    LENGTHS,
    flat,
    load_state,
    random_rows,
    response_tokens,
    save_state,
    signs,
    split_rows,
)
from siirl_dask.training import TrainBatch, ValueBatch, build_critic, build_reference, build_trainer
from siirl_dask.training.model.attention import packed_attention
from siirl_dask.training.packing import Packing, micro_batches
from siirl_dask.training.parallel.dtensor import full_tensor, local
from siirl_dask.training.parallel.mesh import sequence_ranks
from siirl_dask.training.parallel.sequence_parallel import shard_tokens
from tests.settings import trainer_config
from tests.training.roles import critic, policy

MODELS = {
    "qwen3 tied": {"family": "qwen3", "heads": 4, "kv_heads": 1},
    "qwen2 untied": {"family": "qwen2", "heads": 2, "kv_heads": 2, "tied": False},
    "llama tied": {"family": "llama", "heads": 4, "kv_heads": 2},
    "qwen3, two keys": {"family": "qwen3", "heads": 4, "kv_heads": 2},
}
CASES = {
    "2 share": (2, "qwen3 tied", {"sequence_parallel": 2}),
    "2 share, recomputed": (
        2,
        "qwen2 untied",
        {"sequence_parallel": 2, "gradient_checkpointing": True},
    ),
    "2 x 2 share": (4, "qwen2 untied", {"sequence_parallel": 2}),
    "2 x 2 share, recomputed": (
        4,
        "qwen3 tied",
        {"sequence_parallel": 2, "gradient_checkpointing": True},
    ),
    "2 x 2 share, 2 replicas": (4, "llama tied", {"sequence_parallel": 2, "shard_size": 2}),
    "4 share, recomputed, 2 replicas": (
        4,
        "llama tied",
        {"sequence_parallel": 4, "shard_size": 2, "gradient_checkpointing": True},
    ),
    "2 split layers": (2, "qwen3, two keys", {"tensor_parallel": 2}),
    "2 x 2 split layers": (4, "qwen2 untied", {"tensor_parallel": 2}),
    "2 x 2 split layers of llama": (4, "llama tied", {"tensor_parallel": 2}),
    "2 x 2 split layers, recomputed": (
        4,
        "qwen3, two keys",
        {"tensor_parallel": 2, "gradient_checkpointing": True},
    ),
    "bfloat16": (2, "llama tied", {"sequence_parallel": 2, "dtype": Dtype.bfloat16}),
    "bfloat16, split layers": (2, "llama tied", {"tensor_parallel": 2, "dtype": Dtype.bfloat16}),
}
BFLOAT16 = [name for name in CASES if name.startswith("bfloat16")]
EXACT = [name for name in CASES if name not in BFLOAT16]
MOVED_FROM = "2 x 2 split layers of llama"
MOVED_TO = {"2 split layers": {"tensor_parallel": 2}, "2 have shards": {}}
CRITICS = {
    "2 share": (2, {"sequence_parallel": 2}),
    "2 x 2 share": (4, {"sequence_parallel": 2}),
    "2 x 2 split layers": (4, {"tensor_parallel": 2}),
}
SETTINGS = {"lr": 1e-4, "eps": 1e-6, "max_grad_norm": 1e6, "max_tokens_per_micro_batch": 24}
ENDS = ((0, 0.6, 1, 1, 1), (0, 0, 0.4, 0.4, 1), (0, 0, 0, 0, 1))
"""Fractions of an update's rows where each of four ranks' begin. Some ranks have none."""
# needs full rows and the entropy's gradient
LOSS = partial(policy_loss, surrogate=gmpo, entropy_coefficient=0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny_model(root / name, seed=1, hidden=32, head_dim=12, **options)
        for name, options in MODELS.items()
    }


@pytest.fixture(scope="module")
def seen(folders, tmp_path_factory):
    state = tmp_path_factory.mktemp("state") / "policy"
    return run_ranks(4, partial(in_each_rank, folders, state), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(folders):
    results = {}
    for name, folder in folders.items():
        trainer = policy(folder, config(), temperature=0.7)
        results[name] = learn(trainer, Rank(), policy_batch, LOSS) | {
            "next": update_again(trainer, Rank())
        }
    learner = critic(folders["llama tied"], config())
    return results | {"critic": learn(learner, Rank(), value_batch, partial(value_clip, clip=1e6))}


def config(**options):
    return trainer_config(**SETTINGS | options)


def in_each_rank(folders, state, world):
    pair = dist.new_group([0, 1])
    results = {}
    for name, (size, model, options) in CASES.items():
        if world.rank < size:
            rank = Rank(world.rank, size, pair if size == 2 else world.group)
            options = dict(options)
            dtype = options.pop("dtype", Dtype.float32)
            sharded = config(backend="fsdp", **options)
            trainer = policy(folders[model], sharded, temperature=0.7, rank=rank, dtype=dtype)
            results[name] = learn(
                trainer, rank, policy_batch, LOSS, updates=1 if name in BFLOAT16 else 3
            )
            if name == MOVED_FROM:
                save_state(trainer, state, rank)
                dist.barrier()  # else one of two ranks could load before four have saved
    for name, options in MOVED_TO.items():
        if world.rank < 2:
            rank, sharded = Rank(world.rank, 2, pair), config(backend="fsdp", **options)
            trainer = policy(folders["llama tied"], sharded, temperature=0.7, rank=rank)
            load_state(trainer, state, rank)
            results[f"moved to {name}"] = update_again(trainer, rank)
    for name, (size, options) in CRITICS.items():
        if world.rank < size:
            rank = Rank(world.rank, size, pair if size == 2 else world.group)
            learner = critic(folders["llama tied"], config(backend="fsdp", **options), rank)
            results[f"critic, {name}"] = learn(
                learner, rank, value_batch, partial(value_clip, clip=1e6)
            )
    return results


def learn(learner, rank, batch, loss, updates=3):
    """Take updates. Returns scores before and metrics of each, the first one's gradients, and
    the last weights.
    """
    seen = {"metrics": [], "scores": []}
    for at in range(updates):
        scores, data = batch(learner, own_rows(rank, at))
        seen["metrics"].append(learner.update([data], loss, sequence_mean_token_mean))
        seen["scores"].append(scores)
        if at == 0:
            named = learner._network.by_name()
            seen["gradients"] = {
                name: full_tensor(parameter.grad).clone() for name, parameter in named.items()
            }
    seen["weights"] = {name: tensor.clone() for name, tensor in learner.weights()}
    seen["held"] = sum(local(tensor).numel() for tensor in flat(learner.state()).values())
    return seen


def update_again(trainer, rank):
    """Take another update on the rows of the first. Returns its metrics and the weights after
    it.
    """
    metrics = trainer.update(
        [policy_batch(trainer, own_rows(rank, 0))[1]], LOSS, sequence_mean_token_mean
    )
    return metrics, {name: tensor.clone() for name, tensor in trainer.weights()}


def own_rows(rank, at):
    ends = [round(len(LENGTHS[at:]) * end) for end in ENDS[at][:: 4 // rank.size]]
    return random_rows(LENGTHS[at:], range(*ends[rank.rank : rank.rank + 2]))


def policy_batch(trainer, rows):
    scores = trainer.logprobs(rows)
    responses = [rows.tokens[:0], *(row[prompt:] for row, prompt in split_rows(rows))]
    batch = TrainBatch(
        rows=rows,
        mask=torch.cat(responses) % 3 != 0,
        old_logprobs=scores.logprobs,
        rollout_logprobs=scores.logprobs,
        advantages=signs(rows),
    )
    return [scores.logprobs, scores.entropy, scores.collision], batch


def value_batch(critic, rows):
    values = critic.values(rows)
    return [values], ValueBatch(rows=rows, old_values=values, returns=signs(rows))


def assert_learned_alike(ranks, expected):
    """Compare metrics, gradients and weights of each rank, and the concatenated scores of all
    ranks.
    """
    for result in ranks:
        for metrics, theirs in zip(result["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(theirs, abs=1e-6, rel=1e-6)
        for key, gradient in expected["gradients"].items():
            assert_close(result["gradients"][key], gradient, atol=1e-6, rtol=0)
            assert_close(result["weights"][key], expected["weights"][key], atol=1e-4, rtol=0)
    for at, scores in enumerate(expected["scores"]):
        together = [
            torch.cat(parts)
            for parts in zip(*(result["scores"][at] for result in ranks), strict=True)
        ]
        assert_close(together, scores, atol=1e-4 if at else 1e-5, rtol=0)


@pytest.mark.parametrize("name", EXACT)
def test_a_parallel_policy_learns_like_a_single_process(name, seen, alone):
    size, model, _ = CASES[name]
    assert_learned_alike([seen[rank][name] for rank in range(size)], alone[model])


def test_a_tensor_parallel_rank_holds_a_shard_and_replicated_embeddings(seen, folders):
    for name in (name for name in EXACT if "split" in name):
        size, model, _ = CASES[name]
        numbers = count_parameters(str(folders[model]))
        for rank in range(size):
            assert seen[rank][name]["held"] < 3.1 * (numbers.total + 2 * numbers.largest) / size, (
                name
            )


@pytest.mark.parametrize("name", CRITICS)
def test_a_parallel_critic_learns_like_a_single_process(name, seen, alone):
    size, _ = CRITICS[name]
    assert_learned_alike([seen[rank][f"critic, {name}"] for rank in range(size)], alone["critic"])


def test_a_tensor_parallel_checkpoint_resumes_on_fewer_ranks_and_without(seen, alone):
    expected, weights = alone["llama tied"]["next"]
    for rank in range(2):
        for name in MOVED_TO:
            metrics, moved = seen[rank][f"moved to {name}"]
            assert metrics == pytest.approx(expected, abs=1e-6, rel=1e-6), name
            for key, weight in weights.items():
                assert_close(moved[key], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_works_in_parallel(name, seen, alone):
    for rank in range(2):
        metrics = seen[rank][name]["metrics"][0]
        assert metrics["grad_norm"] == pytest.approx(
            alone["llama tied"]["metrics"][0]["grad_norm"], rel=0.05
        )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=6),
    size=st.integers(2, 4),
    data=st.data(),
)
def test_every_token_is_computed_once_and_scored_for_its_owner(lengths, size, data):
    owner = torch.tensor(
        sorted(
            data.draw(
                st.lists(st.integers(0, size - 1), min_size=len(lengths), max_size=len(lengths))
            )
        )
    )
    (batch,) = micro_batches(random_rows(lengths), budget=1000)
    owners = owner.repeat_interleave(batch.offsets.diff())
    parts = [shard_tokens(batch, owners, Rank(rank, size)) for rank in range(size)]
    together = torch.cat([part.input_ids for part in parts], dim=1)
    assert {part.input_ids.shape for part in parts} == {parts[0].input_ids.shape}
    assert torch.equal(together[:, : batch.input_ids.shape[1]], batch.input_ids)
    assert all(
        sum(count * length for count, length in part.runs) == together.shape[1] for part in parts
    )
    sent = [part.targets.split(part.route.sent) for part in parts]
    for rank, part in enumerate(parts):
        received = [message[rank] for message in sent]
        assert [len(message) for message in received] == part.route.received
        assert torch.equal(torch.cat(received)[part.route.order], batch.targets[owners == rank])


@pytest.mark.parametrize("window", [1, 7, 600])
def test_a_sliding_window_in_blocks_equals_a_full_mask(window):
    query, key, value = (torch.randn(1, heads, 1300, 8) for heads in (4, 2, 2))
    distance = torch.arange(1300)[:, None] - torch.arange(1300)
    mask = (distance >= 0) & (distance < window)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    output, _ = packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        packing=Packing(((1, 1300),)),
        sliding_window=window,
    )
    assert_close(output, expected.transpose(1, 2), atol=1e-5, rtol=0)


def test_memory_of_a_long_row_is_linear_in_its_length(folders, tmp_path):
    """A mask of 8192 x 8192 numbers would take 256 MiB, and so would the scores of each head."""
    grown = run_ranks(1, partial(growth, folders["llama tied"], tmp_path / "window"), tmp_path)[0]
    assert all(bytes_ < 128 * 2**20 for bytes_ in grown), grown


def growth(folder, windowed, world):
    """Return the growth of peak memory, in bytes, in an update on 8192 tokens, without and with
    a sliding window.
    """
    tiny_model(windowed, heads=2, hidden=32, head_dim=12, family="qwen2")
    settings = json.loads((windowed / "config.json").read_text())
    window = {
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 0,
        "layer_types": None,
    }
    (windowed / "config.json").write_text(json.dumps(settings | window))
    results = []
    for path in (folder, windowed):
        trainer = policy(path, config(gradient_checkpointing=True))
        for lengths in ([(3, 4)], [(192, 8000)]):
            rows = random_rows(lengths)
            none = torch.zeros(response_tokens(rows))
            batch = TrainBatch(
                rows=rows, old_logprobs=none, rollout_logprobs=none, advantages=none + 1
            )
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            trainer.update([batch], LOSS)
        results.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    return results


@pytest.mark.parametrize("make", [build_trainer, build_reference, build_critic])
def test_sequence_parallelism_that_does_not_divide_is_refused(folders, make):
    def build(model, ranks):
        arguments = {
            "model": ModelConfig(path=str(folders[model])),
            "trainer": config(backend="fsdp", sequence_parallel=ranks),
        }
        if make is not build_critic:
            arguments["rollout"] = RolloutConfig()
        make(Device("w0"), Rank(), **arguments)

    with pytest.raises(
        ConfigError, match=r"sequence_parallel=4: expected a divisor of the 2 heads"
    ):
        build("qwen2 untied", 4)
    with pytest.raises(
        ConfigError, match=r"sequence_parallel=2: expected a divisor of the role's 1 worker"
    ):
        build("llama tied", 2)


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("shard_size", 2, "fsdp.shard_size"),
        ("offload", True, "fsdp.offload"),
        ("sequence_parallel", 2, "fsdp.sequence_parallel"),
        ("compile", True, "compile"),
        ("lora_rank", 4, "lora.rank"),
    ],
)
def test_options_excluded_by_tensor_parallelism_are_refused(option, value, key):
    with pytest.raises(
        ConfigError, match=rf"tensor_parallel=2: .* together with trainer\.{key}; leave one out"
    ):
        config(backend="fsdp", tensor_parallel=2, **{option: value})


def test_the_torch_backend_refuses_sequence_and_tensor_parallelism():
    with pytest.raises(ConfigError, match=r"sequence_parallel=2: .* take trainer\.backend=fsdp"):
        config(sequence_parallel=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: .* take trainer\.backend=fsdp"):
        config(tensor_parallel=2)
    with pytest.raises(ConfigError, match="sequence_parallel=0: expected at least 1"):
        config(sequence_parallel=0)
    with pytest.raises(ConfigError, match="expected a divisor of the role's 3 workers"):
        sequence_ranks(Rank(0, 3), 2, torch.device("cpu"))
