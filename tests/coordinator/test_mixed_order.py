from collections import Counter
from fractions import Fraction
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.data_order import GlobalOrder, Interleaving, MixedOrder

weight = st.integers(1, 50).map(Fraction) | st.sampled_from(
    [Fraction("0.7"), Fraction("0.001"), Fraction("3.3")]
)
groups = st.lists(st.integers(1, 9), min_size=1, max_size=6)
tables = st.lists(st.tuples(groups, weight), min_size=1, max_size=5)


def mixed(tables, batch, seed=3):
    return MixedOrder([sizes for sizes, _ in tables], [weight for _, weight in tables], batch, seed)


@given(st.lists(weight, min_size=1, max_size=9), st.integers(0, 10**12))
def test_a_source_is_never_more_than_a_few_prompts_from_its_exact_part(weights, start):
    order, total = Interleaving(weights), sum(weights)
    counts = Counter(source for source, _ in map(order.place, range(300)))
    for source, part in enumerate(weights):
        bound = max(1, ceil(log2(len(weights)))) / 2
        assert abs(counts[source] - 300 * part / total) <= bound
        source_of, number = order.place(start)
        assert abs(number - start * weights[source_of] / total) <= bound


@given(st.lists(weight, min_size=1, max_size=9), st.integers(0, 10**12))
def test_each_source_gives_its_prompts_in_order_without_a_gap_from_anywhere(weights, start):
    order, numbers = Interleaving(weights), {}
    for source, number in map(order.place, range(start, start + 200)):
        assert number == numbers.get(source, number)
        numbers[source] = number + 1


@given(tables, st.integers(1, 20), st.integers(0, 40), st.integers(1, 5))
def test_the_prompts_of_a_step_are_the_same_on_any_number_of_workers(tables, batch, step, workers):
    order = mixed(tables, batch)
    numbers = order.prompt_numbers(step)
    parts = [mixed(tables, batch).worker_rows(numbers, index, workers) for index in range(workers)]
    assert all(part == sorted(part, key=lambda row: row.position) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    together = sorted((row for part in parts for row in part), key=lambda row: row.position)
    assert together == [order.row_position(number, place) for place, number in enumerate(numbers)]


@given(tables, st.integers(1, 20), st.integers(0, 200), st.integers(0, 3))
def test_a_source_is_read_as_it_would_be_alone_epoch_after_epoch(tables, batch, first, seed):
    """Resumed anywhere: nothing that came before is looked at."""
    order = mixed(tables, batch, seed)
    alone = [
        GlobalOrder(sizes, streams, seed)
        for (sizes, _), streams in zip(tables, order.streams, strict=True)
    ]
    interleaving = Interleaving([weight for _, weight in tables])
    for number in range(first, first + 30):
        row = order.row_position(number, 0)
        source, within = interleaving.place(number)
        same = alone[source].row_position(within, 0)
        assert (row.source, row.group, row.row, row.number) == (
            source,
            same.group,
            same.row,
            number,
        )
        following = order.following_rows(number).tolist()
        assert following == alone[source].following_rows(within).tolist()


@given(tables, st.integers(1, 20))
def test_every_row_of_a_source_comes_once_in_each_of_its_epochs(tables, batch):
    order = mixed(tables, batch)
    rows = [sum(sizes) for sizes, _ in tables]
    seen = [[] for _ in tables]
    for number in range(120):
        row = order.row_position(number, 0)
        seen[row.source].append((row.group, row.row))
    for own, count in zip(seen, rows, strict=True):
        for start in range(0, len(own), count):
            assert len({*own[start : start + count]}) == len(own[start : start + count])


@given(st.lists(weight, min_size=1, max_size=30), st.integers(1, 64))
def test_the_streams_of_all_sources_are_a_batch_where_it_has_one_for_each(weights, batch):
    streams = MixedOrder([[5]] * len(weights), weights, batch, 0).streams
    assert min(streams) >= 1
    if all(batch * weight >= sum(weights) for weight in weights):
        assert sum(streams) == batch


def test_a_worker_keeps_to_its_part_of_the_row_groups():
    tables = [([64] * 50, Fraction(7)), ([64] * 30, Fraction(2)), ([64] * 20, Fraction("0.5"))]
    order = mixed(tables, 128)
    read = [
        {
            (row.source, row.group)
            for step in range(20)
            for row in order.worker_rows(order.prompt_numbers(step), index, 4)
        }
        for index in range(4)
    ]
    assert sum(map(len, read)) < 1.1 * len(set[tuple[int, int]]().union(*read))
