"""Packed rows laid side by side, for layers and models that do not compute them one after the
other.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.training.model.row_layout import (
    MOST_PADDING,
    one_after_another,
    row_groups,
    side_by_side,
    single_rows,
)

RUNS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 400)), min_size=1, max_size=8).map(
    lambda runs: tuple(sorted(runs, key=lambda run: run[1]))
)


@given(runs=RUNS)
def test_every_row_is_in_one_group_in_order_and_little_of_a_group_is_padding(runs):
    lengths = [length for count, length in runs for _ in range(count)]
    groups = list(row_groups(runs))
    assert [length for group in groups for length in group] == lengths
    for group in groups:
        assert sum(group) >= (1 - MOST_PADDING) * len(group) * max(group)
    assert list(single_rows(runs)) == [(length,) for length in lengths]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    shape=st.sampled_from([(), (3,), (2, 3)]),
)
def test_rows_side_by_side_have_their_tokens_first_then_zeros_and_are_packed_again_as_they_were(
    lengths, shape
):
    packed = torch.randn(sum(lengths), *shape) + 10
    rows = side_by_side(packed, tuple(lengths))
    for row, tokens in zip(rows, packed.split(lengths), strict=True):
        assert torch.equal(row[: len(tokens)], tokens)
        assert not row[len(tokens) :].any()
    assert torch.equal(one_after_another(rows, tuple(lengths)), packed)
