from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.training import PackedRows
from siirl_dask.training.packing import micro_batches

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=12)


def pack(lengths):
    totals = [prompt + response for prompt, response in lengths]
    tokens = torch.arange(100, 100 + sum(totals))
    return PackedRows(
        tokens, torch.tensor([0, *totals]).cumsum(0), torch.tensor([p for p, _ in lengths]).long()
    )


def responses(rows):
    parts = rows.tokens.split(rows.offsets.diff().tolist())
    return [
        part[prompt:].tolist()
        for part, prompt in zip(parts, rows.prompt_lengths.tolist(), strict=True)
    ]


@given(lengths=LENGTHS, budget=st.integers(1, 40))
def test_every_row_is_in_one_micro_batch_in_order_within_the_budget(lengths, budget):
    rows = pack(lengths)
    batches = micro_batches(rows, budget)
    targets = [
        batch.targets[a:b].tolist()
        for batch in batches
        for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)
    ]
    assert targets == responses(rows)
    for batch in batches:
        assert batch.input_ids.numel() <= budget or len(batch.offsets) == 2


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9), budget=st.integers(1, 40))
def test_micro_batches_are_the_fewest_and_then_the_most_even(lengths, budget):
    """Compare with every cut of so few rows."""
    cuttings = [
        [sum(lengths[a:b]) for a, b in pairwise((0, *cuts, len(lengths)))]
        for count in range(len(lengths))
        for cuts in combinations(range(1, len(lengths)), count)
    ]
    allowed = [cut for cut in cuttings if max(cut) <= budget]
    sizes = [
        batch.input_ids.numel()
        for batch in micro_batches(pack([(length, 0) for length in lengths]), budget)
    ]
    if max(lengths) <= budget:
        fewest = min(map(len, allowed))
        assert (len(sizes), max(sizes)) == (
            fewest,
            min(max(cut) for cut in allowed if len(cut) == fewest),
        )
    else:
        assert max(sizes) == max(lengths)


@given(lengths=LENGTHS, budget=st.integers(1, 40))
def test_each_response_token_is_predicted_from_the_token_before_it(lengths, budget):
    rows = pack(lengths)
    everything = torch.cat([torch.tensor(tokens) for tokens in [[], *responses(rows)]]).long()
    for batch in micro_batches(rows, budget):
        # tokens are numbered throughout
        assert torch.equal(batch.input_ids[0, batch.predicting], batch.targets - 1)
        assert torch.equal(everything[batch.tokens], batch.targets)


@given(lengths=LENGTHS, budget=st.integers(1, 40))
def test_rows_of_equal_length_are_neighbours_and_positions_begin_at_0(lengths, budget):
    for batch in micro_batches(pack(lengths), budget):
        lengths_in_runs = [length for _, length in batch.runs]
        assert lengths_in_runs == sorted(set(lengths_in_runs))
        expected = [
            position
            for count, length in batch.runs
            for _ in range(count)
            for position in range(length)
        ]
        assert batch.position_ids[0].tolist() == expected


@pytest.mark.parametrize(
    ("offsets", "prompts"),
    [([0, 3], [0]), ([0, 3], [4]), ([0, 4], [1]), ([1, 3], [1]), ([0, 3], [1, 1])],
    ids=[
        "no prompt",
        "prompt longer than row",
        "offsets beyond tokens",
        "offsets not from 0",
        "offsets of other rows",
    ],
)
def test_malformed_rows_are_refused(offsets, prompts):
    with pytest.raises(ValueError, match=r"expected every row|do not have offsets"):
        micro_batches(PackedRows(torch.arange(3), torch.tensor(offsets), torch.tensor(prompts)), 10)
