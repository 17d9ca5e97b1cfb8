"""A scheduler keeps of runs what is small: bounded however many steps and runs there are, and
nothing malformed.
"""

import math
import threading
import tracemalloc

from siirl_dask.errors import DataError
from siirl_dask.views.dashboard.reader import Reader
from siirl_dask.views.dashboard.store import MOST_RECORDS, MOST_RUNS, RunStore


def about(url, **more):
    return {
        "url": url,
        "name": "it",
        "plugin": f"siirl-{url}",
        "members": {"0": "tcp://a:1"},
        "done": 0,
        **more,
    }


def step(number, phase="train", **metrics):
    return {
        "step": number,
        "phase": phase,
        "seconds": 0.5,
        "metrics": {"reward/mean": 0.5, **metrics},
    }


def test_memory_is_flat_over_thousands_of_steps_and_the_curve_still_spans_the_run():
    store = RunStore()
    store.begin(about("a"))
    names = {f"seconds/node-{number}": 1.0 for number in range(60)}

    def feed(first, last):
        for number in range(first, last):
            store.record("a", step(number, **names))
            store.event(
                "siirl-a",
                {"kind": "done", "member": "0", "metrics": {"tokens": ["sum", 1, 7.0, 0, 0, 0]}},
            )

    feed(1, 2500)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    feed(2500, 7500)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    records = store.runs["a"].records
    assert len(records) <= 1.1 * MOST_RECORDS
    assert after - before < 1.2 * MOST_RECORDS * 8192, (
        "as much as the records that are kept, however many there were"
    )
    assert (records[0]["step"], records[-1]["step"]) == (1, 7499)
    assert store.runs["a"].tokens == {"0": 7.0}


def test_only_the_newest_runs_are_kept_and_a_run_that_is_tried_again_forgets_what_it_does_anew():
    store = RunStore()
    for number in range(MOST_RUNS + 3):
        store.begin(about(f"run-{number}"))
    assert list(store.runs) == [f"run-{number}" for number in range(3, MOST_RUNS + 3)]
    for number in range(1, 6):
        store.record("run-4", step(number))
    store.begin(about("run-4", done=3, plugin="siirl-again"))
    assert [one["step"] for one in store.runs["run-4"].records] == [1, 2, 3]
    assert store.newest().plugin == "siirl-again"


def test_what_is_malformed_or_of_no_run_is_left_out():
    store = RunStore()
    for wrong in ({}, {"url": 1}, about("a", members=[1]), about("a", done=None)):
        store.begin(wrong)
    assert not store.runs
    store.begin(about("a", steps="many", tokenizer=3))
    for wrong in (
        None,
        3,
        {"step": "1"},
        {**step(1), "phase": "nonsense"},
        {**step(1), "metrics": [1]},
    ):
        store.record("a", wrong)
    store.record("b", step(1))
    store.event(
        "siirl-a", {"kind": "done", "member": "9", "metrics": {"tokens": ["sum", 1, 7.0, 0, 0, 0]}}
    )
    store.event("siirl-a", {"kind": "done", "member": "0", "metrics": {"tokens": "many"}})
    assert store.runs["a"].records == []
    assert store.runs["a"].tokens == {}
    store.record(
        "a", step(1, text="no", nan=math.nan, **{f"m{number}": 0.0 for number in range(1000)})
    )
    (kept,) = store.runs["a"].records
    assert len(kept["metrics"]) <= 400
    assert "text" not in kept["metrics"]


def wait_until_read(held):
    for thread in threading.enumerate():
        if thread.name == "siirl-page":
            thread.join(10)
    assert not held.reading
    return held


def test_a_reader_answers_at_once_reads_in_a_thread_and_says_what_went_wrong():
    reader, release = Reader(), threading.Event()

    def slow():
        assert release.wait(10)
        return "read"

    held = reader.get("slow", slow)
    assert held.reading
    assert held.value is None
    assert reader.get("slow", slow) is held, "one reading at a time"
    release.set()
    assert wait_until_read(held).value == "read"

    def broken():
        raise DataError("the folder is gone")

    wrong = wait_until_read(reader.get("broken", broken))
    assert (wrong.remark, wrong.version) == ("the folder is gone", 1)
    strange = wait_until_read(reader.get("strange", lambda: 1 // 0))
    assert "ZeroDivisionError" in strange.remark


def test_a_reader_that_is_closed_has_no_thread_left_and_begins_none():
    reader, release = Reader(), threading.Event()
    held = reader.get("slow", lambda: release.wait(10))
    threading.Timer(0.05, release.set).start()
    reader.close()
    assert held.value is True
    assert not reader.get("more", lambda: 1).reading


def test_a_reader_reads_again_for_a_new_step_keeps_a_bounded_number_and_bounds_its_threads():
    reader, count = Reader(), iter(range(1000))
    for tag in (1, 1, 2):
        held = wait_until_read(
            reader.get("trace", lambda: next(count), tag, soon=0.0, seldom=1000.0)
        )
    assert held.value >= 1
    for number in range(100):
        wait_until_read(reader.get(number, lambda: None))
    assert len(reader._held) <= 33
    release = threading.Event()
    several = [reader.get(("blocked", number), release.wait) for number in range(10)]
    assert sum(one.reading for one in several) == 3
    release.set()
