"""The trace says where the time went: every nanosecond once, the slow one by name, in a form
that Perfetto opens.
"""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.errors import DataError
from siirl_dask.observe.trace.bottleneck import chain_times, find_bottleneck, longest_wait
from siirl_dask.observe.trace.chrome_trace import chrome_trace
from siirl_dask.observe.trace.trace_table import SCHEMA, read_spans, trace_table
from siirl_dask.trace import START, Entry, Lane
from tests.observe.traces import chains, check_events, span

SECOND = 10**9


@given(chains())
@settings(max_examples=40)
def test_every_nanosecond_of_a_chain_is_counted_once(spans):
    covered = max(one.end for one in spans)
    assert sum(left for _, left in chain_times(spans)) == covered
    (worker,) = find_bottleneck(spans).workers
    assert worker.wall == sum(worker.lanes.values()) == covered


@given(chains("0"), chains("1"), st.data())
@settings(max_examples=30)
def test_any_spans_become_slices_that_nest(first, second, data):
    beside = [
        span(
            "0",
            Lane.TRANSFER,
            "a->b",
            *data.draw(st.tuples(st.integers(0, 300), st.integers(0, 300))),
            beside=True,
        )
        for _ in range(data.draw(st.integers(0, 20)))
    ]
    spans = [*first, *second, *beside]
    slices = check_events(json.loads(json.dumps(chrome_trace(spans, "runs/it"))))
    assert sum(map(len, slices.values())) == len(spans)
    assert {pid for pid, _ in slices} == {1, 2}


def test_an_engine_has_a_slice_while_requests_are_under_way():
    points = [(5, 8), (9, 3), (12, 0), (20, 2), (30, 0)]
    counts = [
        span("0", Lane.ENGINE, "requests", at, 0, what="count", beside=True, amount=value)
        for at, value in points
    ]
    slices = check_events(chrome_trace([span("0", Lane.COMPUTE, "rollout", 0, 40), *counts], "it"))
    busy = [event for own in slices.values() for _, _, event in own if event["cat"] == "engine"]
    assert [
        (event["ts"] * 1000, event["dur"] * 1000, event["args"]["requests"]) for event in busy
    ] == [
        (5, 7, 8),
        (20, 10, 2),
    ]


def of_two(slow):
    """Worker '0' generates for ``slow`` seconds, '2' for one; '1' and '3' wait for the rows and
    for one another.
    """
    edge = {"name": "rollout->update", "sequence": 7}
    return [
        span("0", Lane.COMPUTE, "rollout", 0, slow * SECOND),
        span("0", Lane.TRANSFER, start=slow * SECOND, duration=10, what="publish", **edge),
        span("2", Lane.COMPUTE, "rollout", 0, SECOND),
        span("2", Lane.TRANSFER, start=SECOND, duration=10, what="publish", **edge),
        span("1", Lane.WAIT, start=0, duration=slow * SECOND, what="rows", **edge),
        span("1", Lane.COMPUTE, "update", slow * SECOND, SECOND),
        span("3", Lane.WAIT, start=0, duration=slow * SECOND, what="rows", **edge),
        span("3", Lane.COMPUTE, "update", slow * SECOND, SECOND),
        span("3", Lane.WAIT, "update", slow * SECOND, SECOND // 2, what="peers"),
        span("1", Lane.WAIT, "update", slow * SECOND, 1, what="peers"),
    ]


def test_the_slowest_node_and_worker_are_named_with_their_share():
    found = find_bottleneck(of_two(3))
    assert (found.slowest.node, found.slowest.worker) == ("rollout", "0")
    assert found.slowest.share == pytest.approx(0.75)
    assert found.slowest.times_others == pytest.approx(3)
    assert found.uneven == found.slowest
    waits = {worker.worker: worker.waits for worker in found.workers}
    assert waits["1"]["rollout->update", "0"] == 3 * SECOND
    assert waits["3"]["update", "1"] == SECOND // 2, (
        "'1' waits least in the update: it is the one to wait for"
    )
    assert longest_wait(found.workers[1]) == ("rollout->update", "0", pytest.approx(0.75))


def test_workers_that_take_alike_are_not_called_uneven():
    alike = [span(str(number), Lane.COMPUTE, "rollout", 0, SECOND + number) for number in range(4)]
    assert find_bottleneck(alike).uneven is None


def test_the_start_and_the_days_between_two_starts_are_no_part_of_the_steps():
    day = 86_400 * SECOND
    started = span("0", Lane.COMPUTE, "role policy", 0, 9 * SECOND, phase=START, what="start")
    spans = [
        span("0", Lane.COMPUTE, "update", at, SECOND, step=step)
        for step, at in ((1, 9 * SECOND), (2, day))
    ]
    found = find_bottleneck([started, *spans])
    assert (found.seconds, found.slowest.share) == (2.0, 1.0)
    assert (found.start.node, found.start.seconds) == ("role policy", 9.0)


def entries(*starts):
    return [
        Entry(Lane.COMPUTE, "node", "update", False, "train", 3, start, 5, None) for start in starts
    ]


def test_workers_of_one_clock_are_aligned_exactly_and_others_by_their_offsets():
    parts = [
        (1, trace_table(entries(100), "0", "boot a", 1_000)),
        (1, trace_table(entries(200), "1", "boot a", 1_900)),  # its heartbeats were late
        (2, trace_table(entries(300), "0", "boot a", 1_000)),
        (2, trace_table(entries(50_000), "2", "boot b", -48_650)),
    ]
    starts = {(one.worker, one.step): one.start for one in read_spans(parts)}
    assert starts == {("0", 1): 1_100, ("1", 1): 1_200, ("0", 2): 1_300, ("2", 2): 1_350}


def test_counts_are_left_out_but_for_those_of_the_lanes_that_are_asked_for():
    counts = [
        Entry(lane, "count", "n", True, "train", 3, 5, 0, 1) for lane in (Lane.COMPUTE, Lane.ENGINE)
    ]
    parts = [(3, trace_table([*entries(1), *counts], "0", "boot", 0))]
    assert [one.lane for one in read_spans(parts, (Lane.ENGINE,))] == [Lane.COMPUTE, Lane.ENGINE]
    assert len(read_spans(parts)) == 3
    assert len(read_spans(parts, ())) == 1


def replaced(name, values):
    table = trace_table(entries(1, 2), "0", "boot", 0)
    return table.set_column(SCHEMA.names.index(name), name, values)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (trace_table(entries(1), "0", "boot", 0).drop_columns(["lane"]), r"lacks \['lane'\]"),
        (replaced("start", pa.array(["1", "2"])), "has columns"),
        (replaced("duration", pa.array([3, -1])), "negative duration"),
        (replaced("lane", pa.array(["compute", "stroage"])), "the lane 'stroage'"),
        (replaced("name", pa.array(["a", None])), "no 'name'"),
        (replaced("worker", pa.array(["0", "1"])), "several workers"),
    ],
)
def test_a_part_that_is_no_trace_is_refused(part, said):
    with pytest.raises(DataError, match=said):
        read_spans([(1, part)])
