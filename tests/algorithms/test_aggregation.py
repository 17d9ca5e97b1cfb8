from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.algorithms import (
    Totals,
    segment_weights,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    sequence_mean_token_sum_norm,
    token_mean,
)

AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "sequence_mean_token_sum_norm": partial(sequence_mean_token_sum_norm, length=8),
}
every_aggregation = pytest.mark.parametrize("aggregate", AGGREGATIONS.values(), ids=AGGREGATIONS)


def totals_of(lengths):
    return Totals(tokens=sum(lengths), rows=sum(length > 0 for length in lengths))


def weights_of(aggregate, lengths, totals):
    return aggregate(torch.tensor([0, *lengths]).cumsum(0), totals)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 3.5),  # 14 / 4
        ("sequence_mean_token_mean", 3.0),  # (2 + 4) / 2; the empty row is no row
        ("sequence_mean_token_sum", 7.0),  # (2 + 12) / 2
        ("sequence_mean_token_sum_norm", 0.875),  # 7 / 8
    ],
)
def test_hand_checked_values(name, expected):
    lengths, losses = [1, 0, 3], torch.tensor([2.0, 3.0, 4.0, 5.0])
    loss = (losses * weights_of(AGGREGATIONS[name], lengths, totals_of(lengths))).sum()
    assert_close(loss, torch.tensor(expected))


@every_aggregation
@given(lengths=st.lists(st.integers(0, 5), max_size=8), data=st.data())
def test_the_loss_does_not_depend_on_how_workers_divide_the_rows(aggregate, lengths, data):
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    losses = torch.randn(
        sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(len(lengths))
    )
    totals, rows = totals_of(lengths), losses.split(lengths)
    divided = torch.zeros((), dtype=torch.float64)
    for worker in range(3):
        own_rows = [row for row, owner in enumerate(owners) if owner == worker]
        part = torch.cat([losses[:0], *(rows[row] for row in own_rows)])
        divided += (part * weights_of(aggregate, [lengths[row] for row in own_rows], totals)).sum()
    assert_close(divided, (losses * weights_of(aggregate, lengths, totals)).sum())


def by_place(offsets, totals):
    """Weigh a token by its place in its row: an aggregation of a user's that is no function of
    lengths alone.
    """
    places = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(offsets.diff())
    return 1.0 / (1 + places) / max(1, totals.rows)


@pytest.mark.parametrize(
    "aggregate", [*AGGREGATIONS.values(), by_place], ids=[*AGGREGATIONS, "by_place"]
)
@given(
    episodes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=5),
    data=st.data(),
)
def test_a_token_weighs_what_it_does_in_its_episodes_one_row(aggregate, episodes, data):
    totals = totals_of([sum(parts) for parts in episodes])
    expected = weights_of(aggregate, [sum(parts) for parts in episodes], totals).split(
        [sum(p) for p in episodes]
    )
    segments = [
        (part, sum(parts[:at]), sum(parts), whole[sum(parts[:at]) : sum(parts[: at + 1])])
        for parts, whole in zip(episodes, expected, strict=True)
        for at, part in enumerate(parts)
    ]
    chosen = data.draw(st.permutations(segments))[: data.draw(st.integers(0, len(segments)))]
    own, starts, lengths = (
        torch.tensor([row[at] for row in chosen], dtype=torch.int64) for at in range(3)
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), own.cumsum(0)])
    found = segment_weights(aggregate, offsets, totals, starts, lengths)
    assert_close(found, torch.cat([torch.zeros(0), *(row[3] for row in chosen)]))


@every_aggregation
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens_give_no_weights(aggregate, lengths):
    assert weights_of(aggregate, lengths, totals_of(lengths)).shape == (0,)


@every_aggregation
def test_a_worker_without_tokens_of_a_minibatch_gets_no_weights(aggregate):
    assert weights_of(aggregate, [0], Totals(tokens=7, rows=2)).shape == (0,)


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_1_is_refused(length):
    with pytest.raises(ValueError, match="expected at least 1"):
        sequence_mean_token_sum_norm(torch.tensor([0, 2]), Totals(tokens=2, rows=1), length=length)
