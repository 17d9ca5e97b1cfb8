from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.order import GlobalOrder

groups = st.lists(st.integers(1, 9), min_size=1, max_size=12)
batch = st.integers(1, 20)
seed = st.none() | st.integers(0, 5)


def step_of(order, step, workers):
    return [place for index in range(workers) for place in order.share(order.numbers(step), index, workers)]


@given(groups, batch, seed, st.integers(0, 2))
def test_an_epoch_reads_every_row_exactly_once(sizes, batch, seed, epoch):
    order = GlobalOrder(sizes, batch, seed)
    start = epoch * order.steps_per_epoch
    places = [p for step in range(start, start + order.steps_per_epoch) for p in step_of(order, step, 1)]
    assert sorted((p.group, p.row) for p in places) == [(g, r) for g, n in enumerate(sizes) for r in range(n)]


@given(groups, batch, seed, st.integers(0, 30), st.integers(1, 7))
def test_a_step_holds_the_same_rows_at_the_same_positions_on_any_number_of_workers(sizes, batch, seed, step, workers):
    order = GlobalOrder(sizes, batch, seed)
    assert step_of(order, step, workers) == step_of(order, step, 1)


@given(groups, batch, seed, st.integers(1, 7))
def test_a_worker_reads_one_run_of_row_groups_that_no_other_reads_but_at_its_ends(sizes, batch, seed, workers):
    order = GlobalOrder(sizes, batch, seed)
    read = [
        {p.group for step in range(order.steps_per_epoch) for p in order.share(order.numbers(step), index, workers)}
        for index in range(workers)
    ]
    shared = [len(a & b) for i, a in enumerate(read) for b in read[i + 1 :]]
    assert all(count <= 1 for count in shared)


def test_the_order_changes_with_the_epoch_and_with_the_seed():
    order, other = GlobalOrder([8] * 8, 16, 0), GlobalOrder([8] * 8, 16, 1)
    first, second = step_of(order, 0, 1), step_of(order, order.steps_per_epoch, 1)
    assert first != second
    assert first != step_of(other, 0, 1)


def test_without_a_seed_the_tables_order_is_kept():
    order = GlobalOrder([2, 3], 5, None)
    assert [(p.group, p.row) for p in step_of(order, 0, 2)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


@given(groups, batch, seed, st.integers(0, 60))
def test_prompts_numbered_on_are_those_of_the_steps_in_order(sizes, batch, seed, step):
    order = GlobalOrder(sizes, batch, seed)
    assert [order.place(n, i) for i, n in enumerate(order.numbers(step))] == step_of(order, step, 1)
    assert order.numbers(step + 1).start == order.numbers(step).stop
