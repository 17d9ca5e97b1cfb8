"""Timelines of a trace: nothing is shown twice or lost, and the critical path is what the end
waited for.
"""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from siirl_dask.observe.trace.bottleneck import WaitCauses
from siirl_dask.observe.trace.trace_table import read_spans, trace_table
from siirl_dask.observe.trace.transfers import transfers
from siirl_dask.trace import SENT, SHARED, Lane, Recorder, record_transfers
from siirl_dask.views.dashboard import timeline as module
from siirl_dask.views.dashboard.timeline import Leaves, critical_path, leaf_spans, timeline
from tests.observe.traces import chains, span


@given(chains())
def test_leaves_of_a_chain_follow_one_another_and_cover_it_exactly(spans):
    leaves = list(leaf_spans(spans))
    assert all(before.end <= after.start for before, after in pairwise(leaves))
    covered = {at for one in spans for at in range(one.start, one.end)}
    assert {at for one in leaves for at in range(one.start, one.end)} == covered
    for leaf in leaves:  # of the spans that hold it, the shortest one
        around = [one for one in spans if one.start <= leaf.start and one.end >= leaf.end]
        assert leaf.lane in {
            one.lane for one in around if one.duration == min(o.duration for o in around)
        }


@given(chains("0"), chains("1"))
def test_a_critical_path_goes_forward_in_time_and_ends_where_work_ends(first, second):
    spans = [*first, *second]
    leaves = Leaves({worker: [one for one in spans if one.worker == worker] for worker in "01"})
    path = critical_path(leaves, WaitCauses(spans))
    assert all(before.end <= after.start for before, after in pairwise(path))
    working = [
        next((one for one in reversed(own) if one.lane is not Lane.WAIT), own[-1])
        for own in map(leaves.__getitem__, "01")
        if own
    ]
    assert leaves.last_working() == max(working, key=lambda one: one.end, default=None), (
        "of two the first worker's"
    )
    if working and path:
        assert path[-1].end <= max(one.end for one in working)


def of_two_workers():
    """Worker 0 generates for 6 s, worker 1 waits for its rows until then, and learns for 3 s."""
    edge, second = "rollout->update", 10**9
    return [
        span("0", Lane.CONTROL, "train", 0, 7 * second, what="task"),
        span("0", Lane.COMPUTE, "rollout", 0, 6 * second),
        span("0", Lane.TRANSFER, edge, 6 * second, second // 10, what="publish"),
        span("1", Lane.CONTROL, "train", 0, 10 * second, what="task"),
        span("1", Lane.WAIT, edge, 0, 61 * second // 10, what="rows"),
        span("1", Lane.TRANSFER, edge, 61 * second // 10, second // 10, what="receive", amount=80),
        span("1", Lane.COMPUTE, "update", 7 * second, 3 * second),
        span(
            "1", Lane.STORAGE, "rollouts", 7 * second, second, what="write", beside=True, amount=8
        ),
    ]


def test_the_critical_path_leads_to_the_worker_that_was_waited_for():
    shown = timeline(of_two_workers())
    assert shown.workers == ["0", "1"]
    assert shown.seconds == 10
    named = [(one.worker, one.name) for one in shown.critical]
    assert named[0] == ("0", "rollout")
    assert named[-1] == ("1", "update")
    (wait,) = [bar for bar in shown.bars if bar.lane is Lane.WAIT]
    assert (wait.worker, wait.waits_for) == ("1", "0")
    assert [bar.name for bar in shown.bars if bar.beside] == ["rollouts"]


def test_a_timeline_of_very_many_spans_is_bounded_and_says_so(monkeypatch):
    monkeypatch.setattr(module, "MOST_BARS", 50)
    spans = [span("0", Lane.COMPUTE, "a", at * 10, 9) for at in range(200)]
    shown = timeline(spans)
    assert (len(shown.bars), shown.left_out) == (50, 150)
    assert not timeline([]).bars


@pytest.mark.parametrize("source", ["0", "tcp://10.0.0.1:41", "a by messages"])
def test_bytes_from_worker_to_worker_survive_the_trace_with_their_way(source):
    recorder = Recorder()
    record_transfers(recorder, Counter({source: 100, "9": 7}), {source: 60}, at=10)
    spans = read_spans([(1, trace_table(recorder.drain(), "2", "clock", 0))])
    found = transfers(spans)
    assert found.ways == {(source, "2"): {SHARED: 60, SENT: 40}, ("9", "2"): {SENT: 7}}
    assert found.total == 107
    assert not timeline(spans).bars, "a count is no stretch of time"
