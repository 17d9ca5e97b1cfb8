"""Tests of the built-in nodes, each with the smallest resource that shows what it does."""

import mmap
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
import torch

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import DataError, PeerError
from siirl_dask.nodes import (
    draw_minibatches,
    encode_prompts,
    generate,
    load_weights,
    policy_logprobs,
    publish_weights,
)
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.nodes.sampling import make_requests
from siirl_dask.rollout import FinishReason, Generation, Sampling
from siirl_dask.schema import TYPES
from siirl_dask.training import TokenScores


class Words:
    def encode(self, prompt):
        return [len(word) for word in prompt.split()]

    def decode(self, token_ids, *, skip_special):
        return " ".join(map(str, token_ids))

    def plain_text(self, token_ids):
        return None


@dataclass
class Echo:
    """An engine that answers with the seed of the request."""

    tokenizer: Words = field(default_factory=Words)
    version: int = 4
    loaded: dict = field(default_factory=dict)

    def serve(self, queue):
        while taken := queue.next(2, wait=True):
            for ticket, asked in taken:
                queue.complete(
                    ticket, Generation([asked.seed % 1000, 7], [-0.5, -1.0], FinishReason.STOP)
                )

    def load_weights(self, tensors, version):
        self.loaded, self.version = {name: tensor.clone() for name, tensor in tensors}, version


@dataclass
class Holder:
    parameters: dict

    def weights(self):
        yield from self.parameters.items()


def context(resource=None, *, step=1, rank=0, size=1):
    return Context(
        step=step, run_seed=0, rank=Rank(rank, size), device=Device("w"), resource=resource
    )


def rows(**columns):
    count = len(next(iter(columns.values())))
    identity = {
        name: pa.array(range(count), pa.int64()) for name in ("row_id", "group_id", "tokens")
    }
    return pa.table(identity | {n: pa.array(v, TYPES.get(n)) for n, v in columns.items()})


def test_prompts_over_the_limit_are_dropped_with_their_row_ids_and_counted():
    ctx = context(Echo())
    table = encode_prompts(ctx, rows(prompt=["a bb", "a b c d", "ccc"]), max_prompt_length=2)
    assert table["row_id"].to_pylist() == [0, 2]
    assert table["prompt_ids"].to_pylist() == [[1, 2], [3]]
    assert table["tokens"].to_pylist() == [2, 1]
    assert ctx.metrics["data/dropped_prompts"].value == 1


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        encode_prompts(context(Echo()), rows(prompt=["a", ""]), max_prompt_length=9)


def test_samples_are_numbered_by_prompt_and_seeded_by_their_number_alone():
    table = rows(prompt_ids=[[1], [2, 3], [4]])
    rollout = RolloutConfig(n=2)
    whole = generate(context(Echo()), table, rollout=rollout)
    part = generate(context(Echo()), table.slice(1, 1), rollout=rollout)
    assert whole["row_id"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert whole["group_id"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert len(set(map(tuple, whole["response_ids"].to_pylist()))) == 6
    assert part.to_pylist() == whole.slice(2, 2).to_pylist()
    assert whole["tokens"].to_pylist() == [3, 3, 4, 4, 3, 3]
    assert set(whole["weights_version"].to_pylist()) == {4}


def test_a_row_has_the_number_and_the_seed_that_its_sample_was_drawn_with():
    made, requests = make_requests(
        context(), rows(prompt_ids=[[1], [2, 3]]), [Sampling(max_tokens=4)] * 3
    )
    assert made["sampling_seed"].to_pylist() == [request.seed for request in requests]
    assert made["sample_number"].to_pylist() == [0, 1, 2, 0, 1, 2]


def test_every_row_is_handed_over_once_as_it_is_in_the_table():
    handed, ctx = [], context(Echo())
    ctx.hand_over = handed.append
    table = rows(prompt_ids=[[1], [2, 3], [4]])
    whole = generate(ctx, table, rollout=RolloutConfig(n=2))
    early = pa.concat_tables(handed).sort_by("row_id")
    assert len(handed) == whole.num_rows
    assert early.equals(whole.select(early.column_names))
    assert set(early.column_names) >= {"response_ids", "rollout_logprobs"}


def test_samples_share_the_images_of_their_prompt_beyond_two_billion_bytes():
    """64 images of 4 MiB, sampled 8 times: copies would not fit into offsets of 32 bits, and are
    not made.
    """
    images = pa.Array.from_buffers(
        pa.binary(),
        64,
        [
            None,
            pa.py_buffer(np.arange(65, dtype=np.int32) * 2**22),
            pa.py_buffer(mmap.mmap(-1, 2**28)),
        ],
    )
    table = rows(prompt_ids=[[1, 2]] * 64).append_column("image", images)
    table = table.append_column(
        "images", pa.ListArray.from_arrays(pa.array(range(65), pa.int32()), images)
    )
    before = pa.total_allocated_bytes()
    made, _ = make_requests(context(), table, [Sampling(max_tokens=4)] * 8)
    assert pa.total_allocated_bytes() - before < 2**20
    assert made["row_id"].to_pylist() == list(range(512))
    assert made["image"].nbytes > 2**31
    for name in ("image", "images"):
        slices = (range(chunk.offset, chunk.offset + len(chunk)) for chunk in made[name].chunks)
        assert [place for places in slices for place in places] == [row // 8 for row in range(512)]


def test_another_step_draws_other_samples():
    table = rows(prompt_ids=[[1]])
    one, two = (
        generate(context(Echo(), step=step), table, rollout=RolloutConfig(n=1)) for step in (1, 2)
    )
    assert one["response_ids"] != two["response_ids"]


class Tagged(Words):
    """A tokenizer that has another text without special tokens, but for odd first tokens."""

    def plain_text(self, token_ids):
        if token_ids[0] % 2:
            return None
        return f"plain {token_ids[0]}"


def test_a_response_has_its_text_without_special_tokens_where_that_is_another():
    engine = Echo(tokenizer=Tagged())
    table = rows(prompt_ids=[[1], [2], [3]])
    made = generate(context(engine), table, rollout=RolloutConfig(n=2)).to_pylist()
    assert len({row["plain_response"] is None for row in made}) == 2
    for row in made:
        assert row["plain_response"] == Tagged().plain_text(row["response_ids"])
        assert row["response"] == Words().decode(row["response_ids"], skip_special=True)


def test_an_empty_partition_generates_an_empty_typed_table():
    empty = generate(
        context(Echo()), rows(prompt_ids=[[1]]).slice(0, 0), rollout=RolloutConfig(n=3)
    )
    assert empty.num_rows == 0
    assert empty["response_ids"].type == TYPES["response_ids"]


@pytest.mark.parametrize(("minibatches", "batch_size"), [(1, 5), (4, 32), (3, 10)])
def test_minibatches_are_equal_parts_of_the_shuffled_prompts(minibatches, batch_size):
    groups = [group for group in range(batch_size) for _ in range(2)]
    table = pa.table({"group_id": pa.array(groups, pa.int64())})
    drawn = draw_minibatches(context(), table, minibatches=minibatches, batch_size=batch_size)[
        "minibatch"
    ].to_pylist()
    assert drawn[::2] == drawn[1::2]
    counts = [drawn.count(minibatch) for minibatch in range(minibatches)]
    assert max(counts) - min(counts) <= 2
    part = draw_minibatches(
        context(rank=1, size=2), table.slice(4), minibatches=minibatches, batch_size=batch_size
    )
    assert part["minibatch"].to_pylist() == drawn[4:]


@pytest.mark.parametrize(("minibatches", "batch_size"), [(1, 5), (4, 32), (3, 10)])
def test_split_groups_draws_each_sample_by_itself(minibatches, batch_size):
    ids = pa.array(range(2 * batch_size), pa.int64())
    table = pa.table(
        {"row_id": ids, "group_id": pa.array([row // 2 for row in ids.to_pylist()], pa.int64())}
    )
    options = {"minibatches": minibatches, "batch_size": batch_size, "n": 2, "split_groups": True}
    drawn = draw_minibatches(context(), table, **options)["minibatch"].to_pylist()
    counts = [drawn.count(minibatch) for minibatch in range(minibatches)]
    assert max(counts) - min(counts) <= 1
    assert minibatches == 1 or drawn[::2] != drawn[1::2]
    part = draw_minibatches(context(rank=1, size=2), table.slice(4), **options)
    assert part["minibatch"].to_pylist() == drawn[4:]


def test_every_parameter_is_published_by_one_worker_and_loads_back_to_the_bit():
    parameters = {
        "a": torch.randn(3, 4),
        "b": torch.randn(7).bfloat16(),
        "c": torch.tensor(2.5),
        "d": torch.randn(0, 4),
        "e": torch.randn(2, 3).t(),
    }
    shares = [
        publish_weights(context(Holder(parameters), rank=rank, size=2), rows(prompt_ids=[]))
        for rank in (0, 1)
    ]
    assert sorted(pa.concat_tables(shares)["parameter"].to_pylist()) == sorted(parameters)
    engine = Echo()
    load_weights(context(engine, step=9), pa.concat_tables(shares))
    assert engine.version == 9
    for name, tensor in parameters.items():
        assert engine.loaded[name].dtype == tensor.dtype
        assert torch.equal(engine.loaded[name], tensor)


def test_published_weights_do_not_change_with_the_next_update():
    parameter = torch.zeros(4)
    table = publish_weights(context(Holder({"a": parameter})), rows(prompt_ids=[]))
    parameter += 1
    engine = Echo()
    load_weights(context(engine), table)
    assert torch.equal(engine.loaded["a"], torch.zeros(4))


@pytest.mark.parametrize("change", [{"dtype": ["int8"]}, {"shape": [[5]]}, {"data": [b"xx"]}])
def test_weights_that_do_not_fit_their_description_are_refused(change):
    table = publish_weights(context(Holder({"a": torch.zeros(4)})), rows(prompt_ids=[]))
    for name, value in change.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(value, TYPES[name]))
    with pytest.raises(PeerError, match="'a'"):
        load_weights(context(Echo()), table)


def test_rows_are_packed_without_padding():
    packed = pack_rows(rows(prompt_ids=[[1, 2], [3], [4]], response_ids=[[9], [], [8, 7]]))
    assert packed.rows.tokens.tolist() == [1, 2, 9, 3, 4, 8, 7]
    assert packed.rows.offsets.tolist() == [0, 3, 4, 7]
    assert packed.rows.prompt_lengths.tolist() == [2, 1, 1]
    assert packed.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 3.0, 3.0]
    assert packed.per_token(torch.tensor([5.0, 6.0, 7.0]), TYPES["old_logprobs"]).to_pylist() == [
        [5.0],
        [],
        [6.0, 7.0],
    ]


def test_an_engine_sleeps_while_another_role_computes():
    slept = []

    class Sleeper:
        def sleep(self):
            slept.append(self)

    class Scores:
        def logprobs(self, rows):
            assert slept, "the engine was still awake"
            return TokenScores(torch.zeros(0), torch.zeros(0), torch.zeros(0))

    engine, trainer = Sleeper(), Scores()
    ctx = context(trainer)
    ctx.resources = {"rollout": engine, "policy": trainer}
    kinds = {
        name: TYPES[name] for name in ("row_id", "group_id", "tokens", "prompt_ids", "response_ids")
    }
    policy_logprobs(ctx, pa.schema(kinds).empty_table())
    assert slept == [engine]


def test_a_trainer_sleeps_while_the_engine_generates():
    slept = []

    class Sleeper:
        def sleep(self):
            slept.append(self)

    class Awake(Limits):
        def serve(self, queue):
            assert slept, "the policy still held its memory"
            super().serve(queue)

    engine, policy = Awake(), Sleeper()
    ctx = context(engine)
    ctx.resources = {"rollout": engine, "policy": policy}
    generate(ctx, encoded("a"), rollout=RolloutConfig(n=1, max_response_length=2))
    assert slept == [policy]


def encoded(*words):
    return encode_prompts(context(Echo()), rows(prompt=list(words)), max_prompt_length=9)


@dataclass
class Limits(Echo):
    """An engine that samples as many tokens as it may."""

    def serve(self, queue):
        while taken := queue.next(2, wait=True):
            for ticket, asked in taken:
                tokens = [1] * asked.sampling.max_tokens
                queue.complete(ticket, Generation(tokens, [0.0] * len(tokens), FinishReason.LENGTH))


def test_a_row_of_the_dataset_may_limit_its_own_responses():
    limits = pa.array([3, None, 99], pa.int32())
    table = encoded("a", "b", "c").append_column("max_tokens", limits)
    rows = generate(context(Limits()), table, rollout=RolloutConfig(n=2, max_response_length=8))
    assert [len(ids) for ids in rows["response_ids"].to_pylist()] == [3, 3, 8, 8, 8, 8]


@pytest.mark.parametrize("limit", [0, -2, 1.5, "many"])
def test_a_limit_that_is_no_number_of_tokens_is_refused_with_its_row(limit):
    table = encoded("a").append_column("max_tokens", pa.array([limit]))
    with pytest.raises(DataError, match=r"row 0 has max_tokens=.*at least 1"):
        generate(context(Limits()), table, rollout=RolloutConfig(n=1))
