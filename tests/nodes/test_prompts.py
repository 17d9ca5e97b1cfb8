"""Tests of the expected cost of samples, and of the order in which they begin."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import DataError
from siirl_dask.nodes import encode_prompts, generate, sample_until_mixed
from siirl_dask.nodes.prompts import sampling_costs
from siirl_dask.planner.contract import contract_of
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.tasks.tiny_model import tiny_tokenizer
from tests.nodes.letters import Letters, table
from tests.rollout.test_tokenizer import CHAT

LIMIT = st.one_of(st.none(), st.integers(1, 300))


def sampled(rollout, **columns):
    """Return the prompts in the order in which they begin, and the rows."""
    engine = Letters()
    ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=engine)
    rows = generate(
        ctx,
        encode_prompts(ctx, table(**columns), max_prompt_length=99, rollout=rollout),
        rollout=rollout,
    )
    return engine.begun, rows


@given(
    rows=st.lists(st.tuples(st.integers(1, 10**6), LIMIT, st.integers(1, 10**5)), min_size=1),
    most=st.integers(1, 300),
)
def test_the_cost_is_the_expected_length_within_limits_plus_the_prompt(rows, most):
    expected, limits, prompts = zip(*rows, strict=True)
    rollout = RolloutConfig(max_response_length=most, expected_length_column="expected")
    given = table(expected=pa.array(expected, pa.uint32()), max_tokens=pa.array(limits, pa.int32()))
    costs = sampling_costs(given, prompts, rollout)
    within = [
        min(length, most, limit or most) for length, limit in zip(expected, limits, strict=True)
    ]
    assert (costs - np.array(prompts) // 16).tolist() == within


def test_without_the_column_the_rows_limit_or_the_prompt_counts():
    rollout = RolloutConfig(max_response_length=20)
    limits = pa.array([5, None, 99])
    assert sampling_costs(table(max_tokens=limits), [16, 1, 1], rollout).tolist() == [6, 20, 20]
    assert sampling_costs(table(prompt=["a", "b"]), [7, 3], rollout).tolist() == [7, 3]
    named = RolloutConfig(max_response_length=20, expected_length_column="expected")
    assert sampling_costs(table(max_tokens=limits), [16, 1, 1], named).tolist() == [6, 20, 20]


def test_the_costliest_begin_first_and_order_changes_no_sample():
    prompts = ["a", "bbbb", "cc"]
    by_prompt, rows = sampled(RolloutConfig(n=2), prompt=prompts)
    assert by_prompt == ["bbbb", "bbbb", "cc", "cc", "a", "a"]
    by_limit, _ = sampled(RolloutConfig(n=2), prompt=prompts, max_tokens=[3, 1, 2])
    assert by_limit == ["a", "a", "cc", "cc", "bbbb", "bbbb"]
    rollout = RolloutConfig(n=2, expected_length_column="expected")
    by_length, same = sampled(rollout, prompt=prompts, max_tokens=[99] * 3, expected=[4, 1, 8])
    assert by_length == ["cc", "cc", "a", "a", "bbbb", "bbbb"]
    names = ["row_id", "group_id", "tokens", "prompt", "response_ids"]
    assert same.select(names).equals(rows.select(names))
    assert same["tokens"].to_pylist() == [2, 2, 5, 5, 3, 3]


def test_nodes_that_read_prompts_read_the_optional_length_column():
    rollout = RolloutConfig(expected_length_column="expected")
    for node in (encode_prompts, sample_until_mixed):
        assert contract_of(partial(node, rollout=rollout)).optional == ("max_tokens", "expected")
        assert contract_of(partial(node, rollout=RolloutConfig())).optional == ("max_tokens",)


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (pa.array([1, None]), "'expected' .* is None in row 1"),
        (pa.array([4, 0]), "'expected' .* is 0 in row 1"),
        (pa.array([2.0, 3.0]), "'expected' .* holds double"),
    ],
)
def test_an_expected_length_that_is_no_number_of_tokens_is_refused(expected, said):
    with pytest.raises(DataError, match=said):
        sampling_costs(
            table(expected=expected), [1, 1], RolloutConfig(expected_length_column="expected")
        )


def test_a_null_prompt_is_refused_with_its_row_of_the_dataset():
    words = r"row 1 of step 1 \(row 7 of part 3 of the dataset\): its prompt is null"
    with pytest.raises(DataError, match=words) as error:
        sampled(RolloutConfig(), prompt=["a", None], data_part=[3, 3], data_row=[0, 7])
    assert error.value.origin.rows == (1,)


def test_a_chat_template_that_fails_names_the_row(monkeypatch):
    def encode(prompt):
        raise TypeError(f"object of type {type(prompt).__name__} has no len()")

    monkeypatch.setattr(Letters.tokenizer, "encode", staticmethod(encode))
    with pytest.raises(
        DataError,
        match=r"row 0 of step 1: the chat template fails on its prompt: TypeError: object",
    ):
        sampled(RolloutConfig(), prompt=["a"])


CHATS = [[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The sum"}]] * 2


def encoded(chats, **options):
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer(chat_template=CHAT), "model")
    engine = SimpleNamespace(tokenizer=tokenizer, processor=None)
    ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=engine)
    rows = table(prompt=chats, data_part=[3] * len(chats), data_row=[*range(5, 5 + len(chats))])
    return encode_prompts(ctx, rows, max_prompt_length=99, **options)["prompt_text"].to_pylist()


def test_a_prompt_that_ends_with_an_answer_is_refused_with_its_row():
    with pytest.raises(
        DataError, match=r"\(row 5 of part 3 of the dataset\): its last message is the assistant's"
    ):
        encoded(CHATS)


def test_the_model_goes_on_with_an_answer_where_it_is_told_to():
    texts = encoded([CHATS[0], CHATS[0][:1]], continue_answers=True)
    assert texts == [
        "<|user|>2+2?<|stop|><|assistant|>The sum",
        "<|user|>2+2?<|stop|><|assistant|>",
    ]
