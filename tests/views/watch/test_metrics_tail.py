"""A log of metrics that is followed: each look reads what came, whatever a new start of the run
does to the file.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import join, open_fs
from siirl_storage.counting import count_reads

from siirl_dask.errors import DataError
from siirl_dask.observe import MetricsLog, read_metrics
from siirl_dask.observe.metrics import METRICS_FILE
from siirl_dask.views.watch.metrics_tail import MetricsTail
from tests.written_runs import train_record, validation_record, write_metrics


def test_records_come_as_they_are_written_on_any_store(store_url):
    tail = MetricsTail(store_url)
    assert not tail.look()
    assert tail.records == []
    log = MetricsLog(store_url)
    log.write(validation_record(0, 0.25))
    assert tail.look()
    for step in (1, 2):
        log.write(train_record(step))
        assert tail.look()
        assert not tail.look()
        assert tail.records == read_metrics(store_url)
    again = MetricsLog(store_url, until=1, attempt=2)
    assert tail.look(), "a new start drops what it does anew: the file has become shorter"
    assert tail.records == read_metrics(store_url)
    for step in (2, 3, 4):
        again.write(train_record(step, seconds=9.0))
    tail.look()
    assert tail.records == read_metrics(store_url)
    fs, path = open_fs(join(store_url, METRICS_FILE))
    fs.rm_file(path)
    assert tail.look()
    assert tail.records == []


@settings(max_examples=30)
@given(data=st.data())
def test_whatever_happens_to_the_file_between_two_looks_the_records_are_those_in_it(
    data, tmp_path_factory
):
    url = str(tmp_path_factory.mktemp("run"))
    tail, lines = MetricsTail(url), []
    for attempt in range(1, data.draw(st.integers(2, 6))):
        kept = data.draw(st.integers(0, len(lines)))
        steps = data.draw(st.lists(st.integers(1, 6), max_size=4))
        lines = lines[:kept] + [(train_record(step), attempt) for step in steps]
        write_metrics(url, [record for record, _ in lines], [number for _, number in lines])
        tail.look()
        assert tail.records == read_metrics(url)


def test_a_look_asks_for_what_came_and_not_for_the_whole_file(tmp_path):
    reads, url = count_reads(), f"counting://{tmp_path}"
    write_metrics(tmp_path, [train_record(step) for step in range(1, 1001)])
    tail = MetricsTail(url)
    tail.look()
    size = (tmp_path / METRICS_FILE).stat().st_size
    reads.clear()
    MetricsLog(str(tmp_path)).write(train_record(1001))
    assert tail.look()
    assert reads.bytes_of(str(tmp_path)) < 1000 < size
    assert len(tail.records) == 1001


def test_of_a_file_that_is_too_long_beginning_and_end_are_read(tmp_path):
    write_metrics(tmp_path, [train_record(step) for step in range(1, 2001)])
    tail = MetricsTail(str(tmp_path), most=60_000)
    assert tail.look()
    steps = [record["step"] for record in tail.records]
    assert tail.has_gap
    assert (steps[0], steps[-1]) == (1, 2000)
    assert 100 < len(steps) < 500
    MetricsLog(str(tmp_path)).write(train_record(2001))
    assert tail.look()
    assert tail.records[-1]["step"] == 2001


def test_a_line_that_is_cut_waits_and_one_that_is_no_record_is_named(tmp_path):
    write_metrics(tmp_path, [train_record(1)])
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 2, ')
    tail = MetricsTail(str(tmp_path))
    assert tail.look()
    assert not tail.look()
    assert [record["step"] for record in tail.records] == [1]
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, a line"):
        tail.look()
