"""The policies decide where rows go, given who has them, and so what one worker pulls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.layout.assignment import (
    STATISTICS,
    EdgeStatistics,
    assign_owners,
    pull_share,
)
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import make_schema

SCHEMA = make_schema(dict.fromkeys(("row_id", "group_id", "tokens"), "int64"))
WORKERS = tuple("abcdef")
POLICIES = [
    (Rows.GROUPED, False),
    (Rows.BALANCED, False),
    (Rows.BALANCED, True),
    (Rows.ANYWHERE, False),
]


def edge(sources, targets, rows, by_minibatch=False, source="x"):
    return Edge(source, "y", tuple(sources), tuple(targets), rows, by_minibatch, SCHEMA, "x")


def statistics(tokens, sources, groups=None, minibatches=None):
    """Statistics in which row ``i`` lies with source ``sources[i]``, in the order of ids."""
    count, sources = len(tokens), np.asarray(sources, np.int64)
    positions = np.array([(sources[:row] == sources[row]).sum() for row in range(count)], np.int64)
    rest = (
        np.zeros(count, np.int64) if column is None else np.asarray(column)
        for column in (groups, minibatches)
    )
    groups, minibatches = rest
    return EdgeStatistics(
        np.arange(count), groups, np.asarray(tokens, np.int64), minibatches, sources, positions
    )


@st.composite
def transitions(draw):
    """An edge between groups of workers that may overlap, and what its sources publish."""
    sources = draw(st.permutations(WORKERS))[: draw(st.integers(1, 6))]
    targets = draw(st.permutations(WORKERS))[: draw(st.integers(1, 6))]
    rows, by_minibatch = draw(st.sampled_from(POLICIES))
    row = st.tuples(*(st.integers(0, most) for most in (500, len(sources) - 1, 9, 2)))
    columns = zip(*draw(st.lists(row, min_size=1, max_size=60)), strict=True)
    return edge(sources, targets, rows, by_minibatch), statistics(*columns)


@given(transitions(), st.sampled_from([0, 100]))
def test_rows_that_are_balanced_already_stay(transition, quadratic_from):
    """A second edge of the same policy between the same workers moves nothing."""
    first, rows = transition
    owner = assign_owners(first, rows, quadratic_from)
    again = edge(first.targets, first.targets, first.rows, first.by_minibatch)
    after = statistics(rows.tokens, owner, rows.groups, rows.minibatches)
    assert assign_owners(again, after, quadratic_from).tolist() == owner.tolist()


@given(transitions())
def test_the_layout_does_not_depend_on_the_order_of_the_sources(transition):
    first, rows = transition
    backwards = edge(first.sources[::-1], first.targets, first.rows, first.by_minibatch)
    turned = statistics(
        rows.tokens, len(first.sources) - 1 - rows.sources, rows.groups, rows.minibatches
    )
    assert assign_owners(backwards, turned).tolist() == assign_owners(first, rows).tolist()


@given(transitions())
def test_sources_that_are_no_targets_do_not_affect_the_layout(transition):
    first, rows = transition
    apart = edge(
        [f"source {name}" for name in first.sources], first.targets, first.rows, first.by_minibatch
    )
    elsewhere = statistics(rows.tokens, np.zeros(len(rows.tokens)), rows.groups, rows.minibatches)
    assert assign_owners(apart, rows).tolist() == assign_owners(apart, elsewhere).tolist()


@given(transitions())
def test_every_row_of_a_join_has_one_owner_and_is_pulled_once(transition):
    guide, rows = transition
    here = statistics(rows.tokens, np.arange(len(rows.tokens)) % 2, rows.groups, rows.minibatches)
    other = edge(("f", "g"), guide.targets, guide.rows, guide.by_minibatch, source="z")
    pulled = []
    for worker in guide.targets:
        of_guide = pull_share(guide, worker, guide, rows, rows)
        of_other = pull_share(other, worker, guide, rows, here)
        assert of_guide.row_ids.tolist() == of_other.row_ids.tolist()
        pulled += [
            (source, row)
            for source, positions in of_other.positions.items()
            for row in positions.tolist()
        ]
    assert sorted(pulled) == sorted(
        zip(here.sources.tolist(), here.positions.tolist(), strict=True)
    )


def test_rows_stay_with_targets_that_have_them_and_only_the_excess_moves():
    e = edge("ab", "bc", Rows.BALANCED)
    rows = statistics([10, 10, 10, 10, 10, 10], [0, 0, 1, 1, 1, 1])
    assert assign_owners(e, rows).tolist() == [1, 1, 0, 0, 0, 1]


def test_rows_that_may_be_anywhere_stay_and_the_others_go_to_the_least_loaded():
    e = edge("ab", "bc", Rows.ANYWHERE)
    assert assign_owners(e, statistics([3, 30, 10, 10], [0, 1, 0, 0])).tolist() == [1, 0, 1, 1]


def test_each_minibatch_is_balanced_by_itself_where_the_node_reads_it():
    rows = statistics([40, 30, 10, 40, 10, 10], [0] * 6, minibatches=[0, 0, 0, 1, 1, 1])
    assert assign_owners(edge("a", "bc", Rows.BALANCED, True), rows).tolist() == [0, 1, 1, 0, 1, 1]
    assert np.bincount(
        assign_owners(edge("a", "bc", Rows.BALANCED), rows), weights=rows.tokens
    ).tolist() == [70, 70]


def test_rows_without_tokens_are_spread_by_their_number():
    owner = assign_owners(edge("a", "bcde", Rows.BALANCED), statistics([0] * 8, [0] * 8))
    assert np.bincount(owner, minlength=4).tolist() == [2, 2, 2, 2]


def test_the_quadratic_cost_of_a_long_row_keeps_others_away_from_it():
    e, rows = edge("a", "bc", Rows.BALANCED), statistics([100, 50, 50, 50, 50], [0] * 5)
    for quadratic_from, beside_the_longest in ((0, 1), (25, 0)):
        owner = assign_owners(e, rows, quadratic_from)
        assert (owner == owner[0]).sum() - 1 == beside_the_longest
        share = pull_share(e, e.targets[owner[0]], e, rows, rows, quadratic_from)
        assert len(share.row_ids) == 1 + beside_the_longest


def test_replicated_rows_are_pulled_by_everyone():
    e, rows = edge("ab", "cd", Rows.REPLICATED), statistics([1, 1, 1], [0, 1, 0])
    for worker in e.targets:
        share = pull_share(e, worker, e, rows, rows)
        assert {source: positions.tolist() for source, positions in share.positions.items()} == {
            0: [0, 1],
            1: [0],
        }


def test_a_row_of_several_sources_is_listed_once_at_the_first():
    gathered = [(4, 0, 1, 0, 1, 0), (2, 0, 1, 0, 1, 1), (2, 0, 1, 0, 0, 5), (4, 0, 1, 0, 2, 6)]
    rows = EdgeStatistics.from_rows(np.array(gathered, STATISTICS))
    assert (rows.row_ids.tolist(), rows.sources.tolist(), rows.positions.tolist()) == (
        [2, 4],
        [0, 1],
        [5, 0],
    )


def test_a_guide_with_more_rows_than_the_edge_is_refused():
    guide, other = edge("a", "b", Rows.BALANCED), edge("c", "b", Rows.BALANCED, source="z")
    all_rows, fewer = statistics([1, 1, 1], [0, 0, 0]), statistics([1, 1], [0, 0])
    with pytest.raises(
        PeerError,
        match="edge z->y: 1 rows that 'x' has are not among those of 'z' \\(first row_id 2",
    ):
        pull_share(other, "b", guide, all_rows, fewer)
    assert pull_share(other, "b", guide, fewer, all_rows).row_ids.tolist() == [0, 1]
