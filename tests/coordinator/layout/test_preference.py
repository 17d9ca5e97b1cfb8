"""Rows prefer a target that can be told before their lengths: most of them stay there, in as
good a balance.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners
from siirl_dask.coordinator.layout.balance import early_targets, preferred_targets, row_costs
from siirl_dask.planner import EarlyColumns, Edge, Rows
from siirl_dask.schema import make_schema
from tests.coordinator.rows import names


def early_edge(sources, targets, rows=Rows.BALANCED):
    ends = names(sources), names(targets, sources)
    return Edge(
        "a", "b", *ends, rows, False, make_schema({}), "a", EarlyColumns("a", ("response_ids",))
    )


def statistics(tokens, sources, group=8):
    ids = np.arange(len(tokens))
    return EdgeStatistics(
        ids, ids // group, np.asarray(tokens, np.int64), ids * 0, ids * sources // len(ids), ids
    )


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 5000))
@settings(deadline=None)
def test_a_source_is_asked_by_the_targets_that_its_rows_prefer_and_by_few(sources, targets, groups):
    edge, of = early_edge(sources, targets), np.arange(groups)
    pairs = 0
    for at, source in enumerate(edge.sources):
        asking = early_targets(edge, source, {}, prefetch=True)
        assert set(preferred_targets(of, np.full(groups, at), edge).tolist()) <= set(asking)
        pairs += len(asking)
    assert pairs <= sources + targets - 1


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from([r for r in Rows if r is not Rows.REPLICATED]),
       st.lists(st.integers(1, 1000), min_size=1, max_size=150))  # fmt: skip
@settings(deadline=None)
def test_preferences_never_cost_balance(sources, targets, rows, tokens):
    edge, given_rows = early_edge(sources, targets, rows), statistics(tokens, sources)
    costs = row_costs(given_rows.tokens)

    def fullest(e):
        return np.bincount(assign_owners(e, given_rows), weights=costs, minlength=targets).max()

    items = np.bincount(given_rows.groups, weights=costs) if rows is Rows.GROUPED else costs
    assert fullest(edge) <= max(
        fullest(replace(edge, early=None)), 1.02 * costs.sum() / targets, items.max()
    )


@pytest.mark.parametrize("rows", [Rows.BALANCED, Rows.GROUPED])
@pytest.mark.parametrize(
    ("sources", "targets", "count", "least"),
    [(1, 2, 256, 0.9), (8, 8, 512, 0.85), (8, 64, 4096, 0.8)],
)
def test_most_tokens_of_long_tailed_rows_go_where_they_prefer(rows, sources, targets, count, least):
    shares = []
    for seed in range(5):
        tokens = np.minimum(np.random.default_rng(seed).lognormal(9, 1, count), 65_536)
        given_rows, edge = statistics(tokens, sources), early_edge(sources, targets, rows)
        stays = assign_owners(edge, given_rows) == preferred_targets(
            given_rows.groups, given_rows.sources, edge
        )
        shares.append(given_rows.tokens[stays].sum() / given_rows.tokens.sum())
    assert np.mean(shares) > least


def test_rows_that_can_stay_on_their_host_prefer_that():
    edge = early_edge(2, 2)
    hosts = {"0": "a", "1": "b", "2": "a", "3": "b"}
    assert not any(early_targets(edge, source, hosts, prefetch=True) for source in edge.sources)
    given_rows = statistics([5] * 16, 2)
    assert (assign_owners(edge, given_rows, hosts=hosts) == given_rows.sources).all()


def test_groups_that_are_balanced_by_preference_are_nearly_whole():
    tokens = np.minimum(np.random.default_rng(0).lognormal(9, 1, 512), 65_536)
    given_rows, edge = statistics(tokens, 8), early_edge(8, 8)
    policy = names(8, 8)

    def moved(e):
        owner = assign_owners(e, given_rows)
        balanced = replace(given_rows, sources=owner)
        joined = Edge("b", "c", policy, policy, Rows.GROUPED, False, make_schema({}), "b")
        return (
            given_rows.tokens[assign_owners(joined, balanced) != owner].sum()
            / given_rows.tokens.sum()
        )

    assert moved(edge) < 0.2 < 0.5 < moved(replace(edge, early=None))
