"""Prompts that neighbouring rows share are computed once, and nothing else changes."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model, plain_scores
from siirl_dask.testing.rows import grouped_rows, random_rows
from siirl_dask.training import PackedRows
from siirl_dask.training.model.attention import packed_attention
from siirl_dask.training.model.heads import PolicyNetwork
from siirl_dask.training.model.trial import use_row_layout
from siirl_dask.training.packing import Packing, micro_batches
from siirl_dask.training.shared_prompts import find_shared, same_prompts

GROUPS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 4), min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


def numbered(groups):
    """Rows whose tokens are all different, but for prompts that are the same throughout a group."""
    number, tokens, prompts = 0, [], []
    for prompt, responses in groups:
        common = list(range(number, number + prompt))
        number += prompt
        for response in responses:
            tokens.append([*common, *range(number, number + response)])
            prompts.append(prompt)
            number += response
    offsets = [0, *accumulate(map(len, tokens))]
    flat = [token for row in tokens for token in row]
    return PackedRows(torch.tensor(flat), torch.tensor(offsets), torch.tensor(prompts)), tokens


@settings(deadline=None)
@given(groups=GROUPS)
def test_each_prompt_of_neighbours_is_there_once_and_every_token_knows_the_one_before_it(groups):
    rows, tokens = numbered(groups)
    (batch,) = micro_batches(rows, 10**6)
    computed = batch.input_ids[0]
    saved = len(rows.tokens) - len({token for row in tokens for token in row})
    if saved < len(rows.tokens) / 16:
        assert batch.shared is None
        return
    assert sorted(computed.tolist()) == sorted({token for row in tokens for token in row})
    before = [
        token
        for row, prompt in zip(tokens, rows.prompt_lengths.tolist(), strict=True)
        for token in row[prompt - 1 : -1]
    ]
    assert computed[batch.predicting].tolist() == before
    place = {token: position for row in tokens for position, token in enumerate(row)}
    assert batch.position_ids[0].tolist() == [place[token] for token in computed.tolist()]
    whole = computed[batch.shared.whole]
    ends = list(accumulate(length for count, length in batch.runs for _ in range(count)))
    packed = [part.tolist() for part in whole.tensor_split(ends[:-1])]
    assert sorted(packed) == sorted(tokens)
    assert torch.equal(whole[batch.shared.first], computed)


@settings(deadline=None, max_examples=30)
@given(groups=GROUPS, window=st.none() | st.integers(1, 6))
def test_attention_of_shared_prompts_and_its_gradient_are_those_of_whole_rows(groups, window):
    rows, _ = numbered(groups)
    (batch,) = micro_batches(rows, 10**6)
    if batch.shared is None:
        return
    numbers = torch.Generator().manual_seed(0)
    count = batch.input_ids.shape[1]
    heads = [
        torch.randn(1, each, count, 8, generator=numbers, requires_grad=True) for each in (4, 2, 2)
    ]
    packing = Packing(batch.runs, shared=batch.shared)
    output, _ = packed_attention(
        torch.nn.Identity(), *heads, None, packing=packing, sliding_window=window
    )
    whole = [each[:, :, batch.shared.whole] for each in heads]
    apart, _ = packed_attention(
        torch.nn.Identity(), *whole, None, packing=Packing(batch.runs), sliding_window=window
    )
    expected = apart[:, batch.shared.first]
    assert_close(output, expected)
    weights = torch.randn(output.shape, generator=numbers)
    given_, wanted = (
        torch.autograd.grad((each * weights).sum(), heads) for each in (output, expected)
    )
    for one, other in zip(given_, wanted, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_log_probs_and_gradients_are_those_of_each_row_by_itself(tmp_path, family):
    folder = tiny_model(tmp_path / "model", seed=1, family=family, heads=4, kv_heads=2)
    rows = grouped_rows([(17, [11] * 4), (12, [3, 11, 0]), (1, [2]), (17, [11] * 3)])
    model = load_model(folder)
    network = PolicyNetwork(load_model(folder), device=torch.device("cpu"), temperature=0.7)
    use_row_layout(network, str(folder))
    (batch,) = micro_batches(rows, 10**6)
    assert batch.shared is not None
    assert batch.input_ids.numel() == 17 + 44 + 12 + 14 + 3 + 17 + 33
    results = network(batch)
    assert [result._is_view() for result in results] == [False] * 3, "FSDP hooks no views"
    logprobs, entropy, _ = results
    expected = plain_scores(model, rows, 0.7)
    assert_close(logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert_close(entropy.detach(), expected.entropy, atol=1e-4, rtol=0)
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    (logprobs * weights).sum().backward()
    (expected.logprobs * weights).sum().backward()
    plain = dict(model.named_parameters())
    for name, parameter in network.by_name().items():
        assert_close(
            parameter.grad,
            plain[name].grad,
            atol=1e-4,
            rtol=1e-4,
            msg=lambda said, at=name: f"{at}: {said}",
        )


def test_rows_of_different_prompts_are_packed_as_ever():
    rows = random_rows([(3, 4), (3, 4), (2, 9)])
    (batch,) = micro_batches(rows, 10**6)
    assert batch.shared is None
    (apart,) = micro_batches(grouped_rows([(9, [2, 2])]), 10**6, share=False)
    assert (apart.shared, apart.input_ids.numel()) == (None, 22)


def test_a_prompt_that_is_short_beside_its_responses_is_left_in_each_row():
    """Handing prompts out and adding up their gradients takes time in each layer."""
    rows = grouped_rows([(1, [40, 40])])
    group = same_prompts(rows.tokens, rows.offsets[:-1], rows.prompt_lengths, None)
    assert find_shared(group, rows.prompt_lengths, rows.offsets.diff(), rows.offsets[:-1]) is None
