import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.data_order import GlobalOrder

groups = st.lists(st.integers(1, 9), min_size=1, max_size=12)
batch = st.integers(1, 20)
seed = st.none() | st.integers(0, 5)


def step_of(order, step, workers):
    numbers = order.prompt_numbers(step)
    return [row for index in range(workers) for row in order.worker_rows(numbers, index, workers)]


@given(groups, batch, seed, st.integers(0, 2))
def test_an_epoch_reads_every_row_exactly_once(sizes, batch, seed, epoch):
    order = GlobalOrder(sizes, batch, seed)
    start = epoch * order.steps_per_epoch
    rows = [
        p for step in range(start, start + order.steps_per_epoch) for p in step_of(order, step, 1)
    ]
    assert sorted((p.group, p.row) for p in rows) == [
        (g, r) for g, n in enumerate(sizes) for r in range(n)
    ]


@given(groups, batch, seed, st.integers(0, 30), st.integers(1, 7))
def test_a_step_is_the_same_on_any_number_of_workers(sizes, batch, seed, step, workers):
    order = GlobalOrder(sizes, batch, seed)
    assert step_of(order, step, workers) == step_of(order, step, 1)


@given(groups, batch, seed, st.integers(1, 7))
def test_workers_share_a_row_group_only_where_their_ranges_meet(sizes, batch, seed, workers):
    order = GlobalOrder(sizes, batch, seed)
    read = [
        {
            p.group
            for step in range(order.steps_per_epoch)
            for p in order.worker_rows(order.prompt_numbers(step), index, workers)
        }
        for index in range(workers)
    ]
    shared = [len(a & b) for i, a in enumerate(read) for b in read[i + 1 :]]
    assert all(count <= 1 for count in shared)


def test_the_order_changes_with_the_epoch_and_with_the_seed():
    order, other = GlobalOrder([8] * 8, 16, 0), GlobalOrder([8] * 8, 16, 1)
    first, second = step_of(order, 0, 1), step_of(order, order.steps_per_epoch, 1)
    assert first != second
    assert first != step_of(other, 0, 1)


def test_without_a_seed_the_order_is_the_tables():
    order = GlobalOrder([2, 3], 5, None)
    assert [(p.group, p.row) for p in step_of(order, 0, 2)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


@given(groups, batch, seed, st.integers(0, 60))
def test_prompt_numbers_follow_the_steps_in_order(sizes, batch, seed, step):
    order = GlobalOrder(sizes, batch, seed)
    assert [order.row_position(n, i) for i, n in enumerate(order.prompt_numbers(step))] == step_of(
        order, step, 1
    )
    assert order.prompt_numbers(step + 1).start == order.prompt_numbers(step).stop


@pytest.mark.parametrize(
    ("sizes", "batch", "seed", "digest"),
    [
        ([7] * 7 + [1], 8, 3, "da33a93b079c8c84"),
        ([64] * 20, 16, 0, "2cd4f643e5d4f305"),
        ([1000, 3, 500], 32, 11, "454c57a760d32254"),
        ([5, 5], 10, None, "75ad58f2b0df62da"),
        ([3], 7, 1, "ed34635bf6d5fdbf"),
    ],
)
def test_the_order_is_that_of_earlier_versions_so_that_their_runs_resume(
    sizes, batch, seed, digest
):
    order = GlobalOrder(sizes, batch, seed)
    steps = [step_of(order, step, 1) for step in range(3 * order.steps_per_epoch)]
    rows = [(p.position, p.group, p.row, p.number) for step in steps for p in step]
    following = [
        order.following_rows(number).tolist()[:20] for number in range(0, 3 * sum(sizes), 7)
    ]
    assert hashlib.sha256(json.dumps([rows, following]).encode()).hexdigest().startswith(digest)


@pytest.mark.parametrize("known", [1, 70, 2**18])
def test_the_rows_do_not_depend_on_how_many_are_known_ahead(known):
    order, other = GlobalOrder([1000, 300], 4, 5, known), GlobalOrder([1000, 300], 4, 5)
    for number in (*range(0, 1300, 3), *range(2600, 1300, -7)):
        assert order.row_position(number, 0) == other.row_position(number, 0)
        ahead = order.following_rows(number).tolist()
        assert ahead == other.following_rows(number).tolist()[: len(ahead)]
        assert len(ahead) < 325
