"""Roles of a placement on more and on fewer workers than it names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.driver.recovery.resizing import Kinds, kinds_of, placement_of

SPLIT = {"rollout": [0, 1], "reward": [0, 1], "policy": [2, 3]}
GENERATES, LEARNS = frozenset({"rollout", "reward"}), frozenset({"policy"})
BEFORE = {"a": GENERATES, "b": GENERATES, "c": LEARNS, "d": LEARNS}


def first(there, count=None, placement=SPLIT, workers=4, before=BEFORE):
    ways = Kinds.of(placement, workers).assign(
        before, there, len(there) if count is None else count
    )
    return next(ways, None)


def letters(kinds, kind):
    return "".join(worker for worker in kinds if kinds[worker] == kind)


@pytest.mark.parametrize(
    ("there", "generate", "learn"),
    [
        ("abcd", "ab", "cd"),
        ("acd", "a", "cd"),  # nobody moves as long as each role has a worker
        ("ab", "a", "b"),  # both that learn are gone: one of the others learns
        ("abx", "ab", "x"),  # a newcomer takes the role that nobody has
        ("abcx", "ab", "cx"),
        ("abcdx", "abx", "cd"),
        ("abcdxyz", "abxz", "cdy"),
        ("bd", "b", "d"),
    ],
)
def test_workers_keep_their_roles_and_newcomers_come_where_most_are_missing(there, generate, learn):
    kinds = first(there)
    assert (letters(kinds, GENERATES), letters(kinds, LEARNS)) == (generate, learn)


def test_too_few_workers_for_the_roles_are_no_run():
    assert first("a") is None
    assert first("") is None


def test_a_run_without_a_placement_has_any_number_of_workers():
    assert list(first("xyz", placement={}, workers=2, before={})) == ["x", "y", "z"]
    assert first("", placement={}, workers=2, before={}) is None


def test_a_role_that_all_workers_have_needs_no_share_of_its_own():
    kinds = first(
        "ab", placement={"rollout": [0, 1, 2], "policy": [2]}, workers=3, before={"a": {"rollout"}}
    )
    assert frozenset({"rollout", "policy"}) in kinds.values()


def test_where_no_plan_fits_workers_move_one_by_one():
    """Two that learn together, of which one is gone: a third that generated learns."""
    ways = list(Kinds.of(SPLIT, 4).assign(BEFORE, "abc", 3))
    assert [(letters(kinds, GENERATES), letters(kinds, LEARNS)) for kinds in ways] == [
        ("ab", "c"),
        ("a", "bc"),
    ]


def test_a_placement_follows_from_the_kinds():
    kinds = first("acdx")
    assert placement_of(kinds, list("acdx"), SPLIT) == {
        "rollout": [0, 3],
        "reward": [0, 3],
        "policy": [1, 2],
    }


@st.composite
def changes(draw):
    """A placement, workers that are there, some of which had a kind before, and a number of them
    to take.
    """
    workers = draw(st.integers(1, 6))
    roles = draw(st.integers(0, 3))
    index = st.lists(st.integers(0, workers - 1), min_size=1, unique=True)
    placement = {f"role{number}": draw(index) for number in range(roles)}
    before = {f"w{index}": kind for index, kind in kinds_of(placement, range(workers)).items()}
    there = draw(st.lists(st.sampled_from([*before, "x", "y", "z"]), unique=True, min_size=1))
    return placement, workers, before, there, draw(st.integers(1, len(there)))


@given(changes())
def test_every_way_gives_each_role_a_worker_and_takes_as_many_as_were_asked_for(change):
    placement, workers, before, there, count = change
    ways = list(Kinds.of(placement, workers).assign(before, there, count))
    for kinds in ways:
        assert len(kinds) == count
        assert {*kinds} <= {*there}
        assert {*kinds.values()} <= {*Kinds.of(placement, workers).shares}
        assert all(placement_of(kinds, list(kinds), placement).values())
    if count == len(there) and ways:
        needed = Kinds.of(placement, workers).roles - frozenset().union(
            *(before.get(name, ()) for name in there)
        )
        stayed = [name for name in there if name in before and ways[0][name] == before[name]]
        assert needed or stayed == [name for name in there if name in before]
