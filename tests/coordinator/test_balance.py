import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.balance import balance, balance_groups, balance_minibatches, split

sizes = st.lists(st.integers(0, 10_000), max_size=200)
owners = st.integers(1, 12)


@given(sizes, owners)
def test_no_owner_carries_more_than_the_mean_and_one_longest_row(sizes, owners):
    owner = balance(sizes, owners)
    loads = np.bincount(owner, weights=sizes, minlength=owners)
    assert len(owner) == len(sizes)
    assert loads.max(initial=0) <= sum(sizes) / owners + max(sizes, default=0)


@given(sizes, owners)
def test_counts_differ_by_at_most_one_when_all_rows_cost_the_same(sizes, owners):
    counts = np.bincount(balance([7] * len(sizes), owners), minlength=owners)
    assert counts.max() - counts.min() <= 1


def test_rows_of_no_size_are_spread_and_not_piled_on_the_first_owner():
    assert sorted(balance([0] * 8, 4).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_hand_checked_example_pairs_long_with_short():
    owner = balance([10, 20, 30, 40, 50, 60, 70, 80], 4)
    groups = sorted(sorted(np.flatnonzero(owner == o).tolist()) for o in range(4))
    assert groups == [[0, 7], [1, 6], [2, 5], [3, 4]]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 15)), min_size=1, max_size=100), owners)
def test_a_group_is_never_split(rows, owners):
    sizes, groups = (np.array(column) for column in zip(*rows, strict=True))
    owner = balance_groups(sizes, groups, owners)
    assert all(len(set(owner[groups == group])) == 1 for group in set(groups.tolist()))


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 3)), min_size=1, max_size=100), owners)
def test_each_minibatch_is_balanced_on_its_own(rows, owners):
    sizes, minibatches = (np.array(column) for column in zip(*rows, strict=True))
    owner = balance_minibatches(sizes, minibatches, owners)
    for minibatch in set(minibatches.tolist()):
        mine = minibatches == minibatch
        loads = np.bincount(owner[mine], weights=sizes[mine], minlength=owners)
        assert loads.max() <= sizes[mine].sum() / owners + sizes[mine].max()


@given(st.integers(0, 1000), owners)
def test_split_covers_everything_once_in_order(count, parts):
    runs = split(count, parts)
    assert [i for start, stop in runs for i in range(start, stop)] == list(range(count))
    assert max(b - a for a, b in runs) - min(b - a for a, b in runs) <= 1


def test_split_matches_the_hand_checked_example():
    assert split(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
