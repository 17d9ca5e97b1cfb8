"""Where rows go, given who has them: the policies, and what one worker pulls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.statistics import STATISTICS, Statistics, assign, share_of
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import make_schema

SCHEMA = make_schema(dict.fromkeys(("row_id", "group_id", "tokens"), "int64"))
WORKERS = tuple("abcdef")
POLICIES = [(Rows.GROUPED, False), (Rows.BALANCED, False), (Rows.BALANCED, True), (Rows.ANYWHERE, False)]


def edge(sources, targets, rows, by_minibatch=False, source="x"):
    return Edge(source, "y", tuple(sources), tuple(targets), rows, by_minibatch, SCHEMA, "x")


def statistics(tokens, sources, groups=None, minibatches=None):
    """Row ``i`` lies with source ``sources[i]``, in the order of ids."""
    count, sources = len(tokens), np.asarray(sources, np.int64)
    positions = np.array([(sources[:row] == sources[row]).sum() for row in range(count)], np.int64)
    rest = (np.zeros(count, np.int64) if column is None else np.asarray(column) for column in (groups, minibatches))
    groups, minibatches = rest
    return Statistics(np.arange(count), groups, np.asarray(tokens, np.int64), minibatches, sources, positions)


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
def test_rows_that_lie_as_the_policy_wants_them_stay(transition, quadratic_from):
    """What an edge brought about, an edge of the same policy between the same workers leaves as it is."""
    first, rows = transition
    owner = assign(first, rows, quadratic_from)
    again = edge(first.targets, first.targets, first.rows, first.by_minibatch)
    after = statistics(rows.tokens, owner, rows.groups, rows.minibatches)
    assert assign(again, after, quadratic_from).tolist() == owner.tolist()


@given(transitions())
def test_the_layout_depends_on_which_worker_has_a_row_and_not_on_the_order_of_the_sources(transition):
    first, rows = transition
    backwards = edge(first.sources[::-1], first.targets, first.rows, first.by_minibatch)
    turned = statistics(rows.tokens, len(first.sources) - 1 - rows.sources, rows.groups, rows.minibatches)
    assert assign(backwards, turned).tolist() == assign(first, rows).tolist()


@given(transitions())
def test_where_rows_come_from_does_not_matter_when_no_source_is_a_target(transition):
    first, rows = transition
    apart = edge([f"source {name}" for name in first.sources], first.targets, first.rows, first.by_minibatch)
    elsewhere = statistics(rows.tokens, np.zeros(len(rows.tokens)), rows.groups, rows.minibatches)
    assert assign(apart, rows).tolist() == assign(apart, elsewhere).tolist()


@given(transitions())
def test_every_row_of_a_join_has_one_owner_and_is_pulled_from_where_it_lies(transition):
    guide, rows = transition
    here = statistics(rows.tokens, np.arange(len(rows.tokens)) % 2, rows.groups, rows.minibatches)
    other = edge(("f", "g"), guide.targets, guide.rows, guide.by_minibatch, source="z")
    pulled = []
    for worker in guide.targets:
        of_guide = share_of(guide, worker, guide, rows, rows)
        of_other = share_of(other, worker, guide, rows, here)
        assert of_guide.row_ids.tolist() == of_other.row_ids.tolist()
        pulled += [(source, row) for source, positions in of_other.by_source.items() for row in positions.tolist()]
    assert sorted(pulled) == sorted(zip(here.sources.tolist(), here.positions.tolist(), strict=True))


def test_rows_stay_with_targets_that_have_them_and_only_the_excess_moves():
    e = edge("ab", "bc", Rows.BALANCED)
    rows = statistics([10, 10, 10, 10, 10, 10], [0, 0, 1, 1, 1, 1])
    assert assign(e, rows).tolist() == [1, 1, 0, 0, 0, 1]


def test_rows_that_may_be_anywhere_stay_whatever_they_cost_and_the_others_go_to_whoever_has_least():
    e = edge("ab", "bc", Rows.ANYWHERE)
    assert assign(e, statistics([3, 30, 10, 10], [0, 1, 0, 0])).tolist() == [1, 0, 1, 1]


def test_each_minibatch_is_balanced_on_its_own_where_the_node_reads_it():
    rows = statistics([40, 30, 10, 40, 10, 10], [0] * 6, minibatches=[0, 0, 0, 1, 1, 1])
    assert assign(edge("a", "bc", Rows.BALANCED, True), rows).tolist() == [0, 1, 1, 0, 1, 1]
    assert np.bincount(assign(edge("a", "bc", Rows.BALANCED), rows), weights=rows.tokens).tolist() == [70, 70]


def test_rows_without_tokens_are_spread_by_their_number():
    owner = assign(edge("a", "bcde", Rows.BALANCED), statistics([0] * 8, [0] * 8))
    assert np.bincount(owner, minlength=4).tolist() == [2, 2, 2, 2]


def test_the_square_of_a_long_row_keeps_others_away_from_it():
    e, rows = edge("a", "bc", Rows.BALANCED), statistics([100, 50, 50, 50, 50], [0] * 5)
    for quadratic_from, beside_the_longest in ((0, 1), (25, 0)):
        owner = assign(e, rows, quadratic_from)
        assert (owner == owner[0]).sum() - 1 == beside_the_longest
        share = share_of(e, e.targets[owner[0]], e, rows, rows, quadratic_from)
        assert len(share.row_ids) == 1 + beside_the_longest


def test_replicated_rows_are_pulled_by_everyone():
    e, rows = edge("ab", "cd", Rows.REPLICATED), statistics([1, 1, 1], [0, 1, 0])
    for worker in e.targets:
        share = share_of(e, worker, e, rows, rows)
        assert {source: positions.tolist() for source, positions in share.by_source.items()} == {0: [0, 1], 1: [0]}


def test_a_row_that_several_sources_published_is_listed_once_where_it_is_found_first():
    found = [(4, 0, 1, 0, 1, 0), (2, 0, 1, 0, 1, 1), (2, 0, 1, 0, 0, 5), (4, 0, 1, 0, 2, 6)]
    rows = Statistics.of(np.array(found, STATISTICS))
    assert (rows.row_ids.tolist(), rows.sources.tolist(), rows.positions.tolist()) == ([2, 4], [0, 1], [5, 0])


def test_a_guide_that_knows_more_rows_than_the_edge_is_refused_with_the_first_row_that_is_missing():
    guide, other = edge("a", "b", Rows.BALANCED), edge("c", "b", Rows.BALANCED, source="z")
    all_rows, fewer = statistics([1, 1, 1], [0, 0, 0]), statistics([1, 1], [0, 0])
    with pytest.raises(PeerError, match="edge z->y: 1 rows that 'x' has are not among those of 'z' \\(first row_id 2"):
        share_of(other, "b", guide, all_rows, fewer)
    assert share_of(other, "b", guide, fewer, all_rows).row_ids.tolist() == [0, 1]
