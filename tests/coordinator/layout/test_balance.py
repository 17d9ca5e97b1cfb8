import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.layout.balance import (
    NOWHERE,
    balance,
    balance_groups,
    balance_in_place,
    balance_minibatches,
    row_costs,
)
from siirl_dask.tables import split

sizes = st.lists(st.integers(0, 10_000), max_size=200)
owners = st.integers(1, 12)


@st.composite
def placed(draw):
    """Costs, number of owners, and where each item lies: anywhere, or nowhere."""
    count = draw(owners)
    items = draw(
        st.lists(st.tuples(st.integers(0, 1000), st.integers(NOWHERE, count - 1)), max_size=150)
    )
    costs, homes = (
        (np.array(column, np.int64) for column in zip(*items, strict=True)) if items else ([], [])
    )
    return np.asarray(costs, np.int64), count, np.asarray(homes, np.int64)


def loads_of(costs, owner, count):
    return np.bincount(owner, weights=costs, minlength=count)


def bound(costs, count):
    """Return the most that the fullest may have: as much as without homes, or 1.02 of the mean."""
    return max(loads_of(costs, balance(costs, count), count).max(), 1.02 * np.sum(costs) / count)


@given(sizes, owners)
def test_no_load_exceeds_the_mean_and_one_longest_row(sizes, owners):
    owner = balance(sizes, owners)
    loads = loads_of(sizes, owner, owners)
    assert len(owner) == len(sizes)
    assert loads.max(initial=0) <= sum(sizes) / owners + max(sizes, default=0)


@given(sizes, st.lists(st.integers(0, 20_000), min_size=1, max_size=12))
def test_loads_that_owners_have_already_count(sizes, carried):
    loads = loads_of(sizes, balance(sizes, len(carried), carried), len(carried)) + carried
    mean = loads.sum() / len(carried)
    assert loads.max() <= max(max(carried), mean + max(sizes, default=0))


@given(sizes, owners)
def test_counts_differ_by_at_most_one_when_all_rows_cost_the_same(sizes, owners):
    counts = np.bincount(balance([7] * len(sizes), owners), minlength=owners)
    assert counts.max() - counts.min() <= 1


def test_rows_of_no_size_are_spread_over_all_owners():
    assert sorted(balance([0] * 8, 4).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_hand_checked_example_pairs_long_with_short():
    owner = balance([10, 20, 30, 40, 50, 60, 70, 80], 4)
    groups = sorted(sorted(np.flatnonzero(owner == o).tolist()) for o in range(4))
    assert groups == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_swaps_find_the_perfect_halves_that_longest_first_misses():
    assert loads_of([3, 3, 2, 2, 2], balance([3, 3, 2, 2, 2], 2), 2).tolist() == [6, 6]


def test_the_longest_row_is_alone_when_even_the_shortest_is_too_much_on_top():
    # longest first: 102 has least in the end, and 6 goes there
    costs = [102, 50, 38, 31, 27, 17, 17, 12, 8, 7, 6]
    owner = balance(costs, 3)
    assert (owner == owner[0]).sum() == 1
    assert loads_of(costs, owner, 3).max() <= 1.02 * sum(costs) / 3


def test_group_totals_beyond_the_range_of_doubles_are_exact():
    """In doubles both totals would be 2**53, and the short one would go to the first owner
    instead of the second.
    """
    costs, groups = np.array([2**53, 1, 2**53, 1]), np.array([0, 0, 1, 2])
    assert balance_groups(costs, groups, 2, np.full(4, NOWHERE)).tolist() == [0, 0, 1, 1]


@given(placed())
def test_staying_at_home_never_costs_balance(case):
    costs, count, homes = case
    owner = balance_in_place(costs, count, homes)
    assert ((owner >= 0) & (owner < count)).all()
    assert loads_of(costs, owner, count).max() <= bound(costs, count)


@given(placed())
def test_balanced_rows_do_not_move_again(case):
    costs, count, homes = case
    once = balance_in_place(costs, count, homes)
    assert balance_in_place(costs, count, once).tolist() == once.tolist()


@given(placed(), st.randoms(use_true_random=False))
def test_a_layout_that_is_balanced_enough_stays_as_it_is(case, random):
    """Also one that came about otherwise: here as longest first gives it, with owners named at
    random.
    """
    costs, count, _ = case
    names = np.array(random.sample(range(count), count))
    homes = names[balance(costs, count)]
    assert balance_in_place(costs, count, homes).tolist() == homes.tolist()


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 15), st.integers(-1, 11)), max_size=100),
    owners,
)
def test_a_group_is_never_split_and_stays_once_it_is_balanced(rows, owners):
    costs, groups, homes = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    homes = np.where(homes < owners, homes, NOWHERE)
    owner = balance_groups(costs, groups, owners, homes)
    assert all(len(set(owner[groups == group])) == 1 for group in set(groups.tolist()))
    totals = np.array(
        [costs[groups == group].sum() for group in sorted(set(groups.tolist()))], np.int64
    )
    assert loads_of(costs, owner, owners).max() <= bound(totals, owners)
    assert balance_groups(costs, groups, owners, owner).tolist() == owner.tolist()


def test_a_group_gathers_where_most_of_its_tokens_lie():
    costs, groups = np.array([5, 6, 4, 3, 9, 9]), np.array([0, 0, 0, 1, 1, 2])
    homes = np.array([1, 2, 1, 0, 0, 2])
    assert balance_groups(costs, groups, 3, homes).tolist() == [1, 1, 1, 0, 0, 2]


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 3), st.integers(-1, 11)), max_size=100),
    owners,
)
def test_each_minibatch_is_balanced_on_its_own_and_stays_once_it_is(rows, owners):
    costs, minibatches, homes = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    homes = np.where(homes < owners, homes, NOWHERE)
    owner = balance_minibatches(costs, minibatches, owners, homes)
    for minibatch in set(minibatches.tolist()):
        rows_of = minibatches == minibatch
        assert loads_of(costs[rows_of], owner[rows_of], owners).max() <= bound(
            costs[rows_of], owners
        )
    assert balance_minibatches(costs, minibatches, owners, owner).tolist() == owner.tolist()


def test_rows_leave_only_an_overloaded_owner():
    costs, homes = np.array([40, 30, 20, 10, 30, 50]), np.array([0, 0, 0, 0, 1, 2])
    assert balance_in_place(costs, 3, homes).tolist() == [0, 1, 0, 2, 1, 2]


def test_a_row_longer_than_the_mean_stays_and_short_ones_leave():
    costs, homes = np.array([100, 1, 1, 1]), np.array([1, 1, 1, 1])
    assert balance_in_place(costs, 2, homes).tolist() == [1, 0, 0, 0]


def test_most_rows_stay_even_with_a_handful_of_rows_an_owner():
    """Swaps with rows that could stay rescue the others; to cut all parts anew would keep a
    quarter at home.
    """
    rng = np.random.default_rng(0)
    costs, homes = rng.lognormal(8, 0.3, 512).astype(np.int64), rng.integers(0, 128, 512)
    assert costs[balance_in_place(costs, 128, homes) == homes].sum() > 0.5 * costs.sum()


def test_a_load_of_two_percent_above_the_mean_moves_nothing():
    for on_the_first, moved in ((102, 0), (103, 3)):
        homes = np.repeat([0, 1], [on_the_first, 200 - on_the_first])
        assert (balance_in_place(np.ones(200, np.int64), 2, homes) != homes).sum() == moved


def test_rows_balanced_anew_go_to_owners_that_have_most_of_them():
    """Leaving rows where they are cannot reach the balance of longest first, so its parts are
    given out instead.
    """
    costs, homes = np.array([31, 78, 78, 16, 17, 6]), np.array([1, 2, NOWHERE, NOWHERE, 0, 1])
    assert balance(costs, 3).tolist() == [2, 0, 1, 2, 2, 2]
    assert balance_in_place(costs, 3, homes).tolist() == [1, 2, 0, 1, 1, 1]


def test_the_cost_of_long_rows_is_quadratic():
    tokens = np.array([0, 1, 100, 1000, 128_000])
    assert row_costs(tokens).tolist() == [1, 1, 100, 1000, 128_000]
    assert row_costs(tokens, 1000).tolist() == [1, 1, 110, 2000, 128_000 + 16_384_000]


@pytest.mark.parametrize("lie", ["nowhere", "anywhere", "together", "half of them"])
@pytest.mark.parametrize("by", ["rows", "groups of 16", "square"])
@pytest.mark.parametrize("seed", [0, 1])
def test_65536_long_tailed_rows_over_1024_workers_balance_to_two_percent(lie, by, seed):
    rows, count = 65_536, 1024
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.lognormal(8, 1, rows), 131_072).astype(np.int64)
    groups = np.arange(rows) // (16 if by == "groups of 16" else 1)
    anywhere = rng.integers(0, count, rows)
    homes = {
        "nowhere": np.full(rows, NOWHERE),
        "anywhere": anywhere,
        "together": np.arange(rows) // 64,
        "half of them": np.where(rng.random(rows) < 0.5, anywhere, NOWHERE),
    }[lie]
    costs = row_costs(tokens, 24_576 * (by == "square"))
    owner = balance_groups(costs, groups, count, homes)
    longest = np.bincount(groups, weights=costs).max()
    loads = loads_of(costs, owner, count)
    assert loads.max() <= max(1.02 * loads.mean(), longest)
    assert balance_groups(costs, groups, count, owner).tolist() == owner.tolist()
    if by == "rows" and lie in ("anywhere", "together"):
        assert costs[owner == homes].sum() > 0.9 * costs.sum()


@settings(max_examples=20, deadline=None)
@given(st.integers(200, 3000), st.sampled_from([0.5, 1.0, 1.5]), st.integers(0, 9))
def test_eight_rows_an_owner_balance_to_two_percent_or_the_longest_row(rows, sigma, seed):
    rng = np.random.default_rng(seed)
    costs, count = rng.lognormal(8, sigma, rows).astype(np.int64) + 1, rows // 8
    owner = balance_in_place(costs, count, rng.integers(0, count, rows))
    loads = loads_of(costs, owner, count)
    assert loads.max() <= max(1.02 * loads.mean(), costs.max())


@given(st.integers(0, 1000), owners)
def test_split_covers_everything_once_in_order(count, parts):
    runs = split(count, parts)
    assert [i for start, stop in runs for i in range(start, stop)] == list(range(count))
    assert max(b - a for a, b in runs) - min(b - a for a, b in runs) <= 1


def test_split_matches_the_hand_checked_example():
    assert split(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
