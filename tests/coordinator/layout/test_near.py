"""Rows stay on their host where that costs no balance: equally balanced, the assignment that
moves less is taken.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners
from siirl_dask.coordinator.layout.balance import (
    NOWHERE,
    HostsOfRows,
    balance,
    balance_groups,
    balance_in_place,
    balance_minibatches,
    balance_near,
)
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import make_schema


@st.composite
def on_hosts(draw):
    """Costs, owners, where each item lies, and the hosts of both; an item at home is on its
    owner's host.
    """
    count, hosts = draw(st.integers(1, 10)), draw(st.integers(1, 4))
    owner_hosts = np.array(
        draw(st.lists(st.integers(0, hosts - 1), min_size=count, max_size=count)), np.int64
    )
    item = st.tuples(st.integers(0, 1000), st.integers(NOWHERE, count - 1), st.integers(0, hosts))
    items = np.array(draw(st.lists(item, max_size=120)), np.int64).reshape(-1, 3)
    costs, homes, lying = items.T.copy()
    lying = np.where(homes == NOWHERE, lying, owner_hosts[homes])
    return costs, count, homes, HostsOfRows(owner_hosts, lying)


def fullest(costs, owner, count):
    return np.bincount(owner, weights=costs, minlength=count).max(initial=0)


def bound(costs, count):
    return max(fullest(costs, balance(costs, count), count), 1.02 * np.sum(costs) / count)


@given(on_hosts())
@settings(deadline=None)
def test_staying_on_a_host_never_costs_balance_and_never_moves_more(case):
    costs, count, homes, hosts = case
    plain, near = (
        balance_in_place(costs, count, homes),
        balance_in_place(costs, count, homes, hosts),
    )
    assert fullest(costs, near, count) <= bound(costs, count)
    assert hosts.leaving_cost(costs, near) <= hosts.leaving_cost(costs, plain)
    again = HostsOfRows(hosts.owners, hosts.owners[near])
    assert balance_in_place(costs, count, near, again).tolist() == near.tolist(), (
        "what is balanced stays"
    )


@given(on_hosts(), st.integers(1, 9))
@settings(deadline=None)
def test_groups_and_minibatches_too_never_move_more(case, parts):
    costs, count, homes, hosts = case
    of = np.arange(len(costs)) // parts
    groups = balance_groups(costs, of, count, homes, hosts)
    assert hosts.leaving_cost(costs, groups) <= hosts.leaving_cost(
        costs, balance_groups(costs, of, count, homes)
    )
    for part in np.unique(of):
        assert len(set(groups[of == part])) == 1
    each = balance_minibatches(costs, of, count, homes, hosts)
    for part in np.unique(of):
        rows = of == part
        assert fullest(costs[rows], each[rows], count) <= bound(costs[rows], count)


@given(on_hosts(), st.lists(st.integers(0, 2000), min_size=10, max_size=10))
@settings(deadline=None)
def test_rows_that_join_a_load_never_make_the_fullest_fuller(case, loads):
    costs, count, _, hosts = case
    carried = np.array(loads[:count], np.int64)
    plain, near = balance(costs, count, carried), balance_near(costs, count, hosts, carried)
    total = fullest(np.append(costs, carried), np.append(plain, np.arange(count)), count)
    mean = 1.02 * (costs.sum() + carried.sum()) / count
    longest = costs.max(initial=0)
    assert fullest(np.append(costs, carried), np.append(near, np.arange(count)), count) <= max(
        total, mean, longest
    )
    assert hosts.leaving_cost(costs, near) <= hosts.leaving_cost(costs, plain)


def edge(sources, targets, rows, by_minibatch=False):
    return Edge("a", "b", sources, targets, rows, by_minibatch, make_schema({}), "a")


def rows_of(sources, each, seed=0):
    """Long-tailed rows in groups of 8, ``each`` on each source, in 4 mini-batches."""
    random = np.random.default_rng(seed)
    count = sources * each
    tokens = np.minimum(random.lognormal(6, 1, count), 16_000).astype(np.int64)
    ids = np.arange(count)
    return EdgeStatistics(
        ids, ids // 8, tokens, random.integers(0, 4, count), ids // each, ids % each
    )


@pytest.mark.parametrize("rows", [Rows.BALANCED, Rows.GROUPED])
@pytest.mark.parametrize("by_minibatch", [False, True])
def test_most_rows_stay_on_their_host_between_roles_that_share_hosts(rows, by_minibatch):
    engines, policies = (tuple(f"{role}{i}" for i in range(16)) for role in "ep")
    hosts = {worker: f"h{int(worker[1:]) // 8}" for worker in (*engines, *policies)}
    e, statistics = edge(engines, policies, rows, by_minibatch), rows_of(16, 64)
    owner, plain = assign_owners(e, statistics, hosts=hosts), assign_owners(e, statistics)
    away = [
        statistics.tokens[statistics.sources // 8 != chosen // 8].sum() for chosen in (owner, plain)
    ]
    assert away[0] < 0.12 * statistics.tokens.sum() < 0.4 * statistics.tokens.sum() < away[1]
    loads = [
        np.bincount(chosen, weights=statistics.tokens, minlength=16).max()
        for chosen in (owner, plain)
    ]
    assert loads[0] <= 1.02 * max(loads[1], statistics.tokens.sum() / 16)


@pytest.mark.parametrize("rows", [Rows.BALANCED, Rows.GROUPED, Rows.ANYWHERE])
@pytest.mark.parametrize("by_minibatch", [False, True])
@given(st.integers(2, 4), st.integers(0, 4), st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_a_run_with_a_worker_on_each_host_has_the_owners_of_a_run_on_one(
    rows, by_minibatch, targets, others, seed
):
    names = tuple("abcdefgh")
    e = edge(names[: targets + others], names[:targets], rows, by_minibatch)
    statistics = rows_of(len(e.sources), 16, seed)
    hosts = {name: f"host-{name}" for name in names}
    assert (
        assign_owners(e, statistics, hosts=hosts).tolist() == assign_owners(e, statistics).tolist()
    )


def test_one_host_and_hosts_without_a_target_are_balanced_as_before():
    names = tuple("abcdefgh")
    for rows in (Rows.BALANCED, Rows.GROUPED, Rows.ANYWHERE):
        e, statistics = edge(names[:4], names[4:], rows), rows_of(4, 40)
        expected = assign_owners(e, statistics).tolist()
        apart = {
            **dict.fromkeys(names[:4], "x"),
            **dict.fromkeys(names[4:6], "y"),
            **dict.fromkeys(names[6:], "z"),
        }
        for hosts in ({}, dict.fromkeys(names, "x"), apart):
            assert assign_owners(e, statistics, hosts=hosts).tolist() == expected
