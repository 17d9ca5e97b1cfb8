"""Traces for tests, and the rules of the Trace Event format."""

from collections import defaultdict

from hypothesis import strategies as st

from siirl_dask.observe.trace.trace_table import TraceSpan
from siirl_dask.trace import Lane

REQUIRED = {"X": {"ts", "dur"}, "C": {"ts", "args"}, "M": {"args"}}


def span(
    worker,
    lane,
    name,
    start,
    duration,
    *,
    what="node",
    beside=False,
    step=1,
    sequence=1,
    amount=None,
    **more,
):
    given = {"phase": "train", **more}
    return TraceSpan(
        step, worker, lane, what, name, beside, given["phase"], sequence, start, duration, amount
    )


def check_events(document):
    """Hold a document to the format, as ui.perfetto.dev does; returns its slices by process and
    thread.
    """
    slices = defaultdict(list)
    named = set()
    for event in document["traceEvents"]:
        kind = event["ph"]
        assert kind in REQUIRED, event
        assert {"name", "pid", "tid", *REQUIRED[kind]} <= event.keys(), event
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        thread = event["pid"], event["tid"]
        if kind == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices[thread].append(
                (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000), event)
            )
        elif kind == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif event["name"] == "thread_name":
            assert thread not in named
            named.add(thread)
    assert slices.keys() <= named
    for own in slices.values():
        around = []
        for start, end, event in sorted(own, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1], (
                f"{event} lies across the end of the slice around it"
            )
            around.append(end)
    return slices


@st.composite
def chains(draw, worker="0"):
    """Spans of one chain: one after the other or within one another, some of no duration,
    without gaps at the top.
    """
    spans = []

    def fill(start, end, depth):
        at = start
        while at < end and len(spans) < 60:
            stop = draw(st.integers(at, end)) if depth else draw(st.integers(at + 1, end))
            lane = draw(st.sampled_from([Lane.COMPUTE, Lane.WAIT, Lane.TRANSFER, Lane.STORAGE]))
            spans.append(
                span(
                    worker,
                    lane if depth else Lane.CONTROL,
                    draw(st.sampled_from("ab")),
                    at,
                    stop - at,
                )
            )
            if depth < 3 and draw(st.booleans()):
                fill(at, stop, depth + 1)
            at = stop + (draw(st.integers(0, 3)) if depth else 0)

    fill(0, draw(st.integers(1, 400)), 0)
    return draw(st.permutations(spans))
