"""A run's trace explains where the time of its workers went, costs no message, and is not there
when it is off.
"""

import json

import pytest

from siirl_dask.observe.trace.bottleneck import find_bottleneck
from siirl_dask.runs.check import PartState, check_run
from siirl_dask.runs.trace import read_trace
from siirl_dask.trace import START, Lane
from tests.observe.traces import check_events


def test_the_lanes_explain_each_worker_s_time_and_name_what_is_slowest(train, tmp_path, capsys):
    from siirl_dask.cli import main

    done = train(
        "traced",
        "cluster.workers=2",
        "cluster.placement={rollout: [0], policy: [1]}",
        "run.steps=4",
        "checkpoint.every=2",
        # between its links a chain takes some milliseconds a step, more beside other tests
        "data.batch_size=192",
        "observe.trace=true",
    )
    url = str(done.url)
    trace = read_trace(url)
    assert trace.steps == [1, 2, 3, 4]
    found = find_bottleneck([span for span in trace.spans if span.step > 1])
    assert [worker.worker for worker in found.workers] == ["0", "1"]
    for worker in found.workers:
        assert worker.explained >= 0.95, worker
    assert done.summary.slowest.node in {"rollout", "update", "old_logprobs"}
    assert 0 < done.summary.slowest.share < 1
    kinds = {(span.worker, span.lane, span.what) for span in trace.spans}
    assert {
        ("0", Lane.TRANSFER, "publish"),
        ("1", Lane.TRANSFER, "receive"),
        ("1", Lane.WAIT, "rows"),
    } <= kinds
    assert {("0", Lane.TRANSFER, "send"), ("0", Lane.TRANSFER, "send early")} & kinds
    assert {(worker, Lane.TRANSFER, "weights") for worker in "01"} <= kinds
    assert {
        ("1", Lane.STORAGE, "write"),
        ("0", Lane.ENGINE, "count"),
        ("0", Lane.STORAGE, "read"),
    } <= kinds
    assert {span.name for span in trace.spans if span.lane is Lane.STORAGE} >= {
        "rollouts",
        "checkpoint",
    }
    assert {span.name for span in trace.spans if span.phase == START} >= {
        "role policy",
        "role rollout",
    }
    progress = [
        span
        for span in trace.spans
        if span.name == "progress" and span.worker == "0" and span.step == 2
    ]
    assert len(progress) >= 2, "an engine tells of each token"
    assert all(
        finding.state is PartState.WHOLE
        for finding in check_run(url, lambda total: None, lambda read: None)
    )

    main(["trace", url, "--steps", "2:3", "-o", str(tmp_path / "trace.json")])
    assert "slowest   node" in capsys.readouterr().out
    slices = check_events(json.loads((tmp_path / "trace.json").read_text()))
    assert {event["args"]["step"] for own in slices.values() for _, _, event in own} == {2, 3}


@pytest.mark.slow
def test_without_a_trace_and_a_plot_a_run_leaves_neither(train):
    without = ["observe.trace=false", "observe.plot=false"]
    done = train("plain", "cluster.workers=1", "cluster.placement={}", "run.steps=1", *without)
    assert not (done.url / "trace").exists()
    assert not (done.url / "plot.svg").exists()
    assert done.summary.slowest is None
