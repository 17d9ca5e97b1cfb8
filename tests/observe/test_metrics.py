"""Metrics survive the message, the merge and the file."""

from __future__ import annotations

import json
import math
from uuid import uuid4

import fsspec
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.context import Metric, Reduce
from siirl_dask.errors import DataError
from siirl_dask.observe import MetricsLog, Record, merge, pack, read_metrics, unpack, values

logged = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.001, 1e3)), max_size=8)


def metric_of(reduce: Reduce, items: list[tuple[float, float]]) -> Metric:
    metric = Metric(reduce)
    for value, weight in items:
        metric.add(value, weight)
    return metric


def train(step: int, **metrics: float | None) -> Record:
    return Record(step=step, phase="train", seconds=1.5, metrics=dict(metrics))


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    return (
        str(tmp_path / "runs" / "a")
        if request.param == "local"
        else f"memory://{uuid4().hex}/runs/a"
    )


@given(st.sampled_from(Reduce), st.lists(logged, max_size=5))
def test_merging_parts_gives_what_logging_all_of_it_in_one_place_gives(reduce, parts):
    whole = metric_of(reduce, [item for part in parts for item in part]).value
    merged = merge({"m": metric_of(reduce, part)} for part in parts)
    if whole is None:
        assert not merged or merged["m"].value is None
    else:
        # std is a difference of squares of up to 1e12: it keeps an absolute error of about
        # sqrt(1e12 * 1e-15)
        assert merged["m"].value == pytest.approx(
            whole, rel=1e-9, abs=1.0 if reduce is Reduce.STD else 1e-4
        )


@given(
    st.dictionaries(
        st.sampled_from(["reward/mean", "tokens", "größe"]),
        st.tuples(st.sampled_from(Reduce), logged),
    )
)
def test_metrics_survive_msgpack_exactly_empty_ones_too(spec):
    metrics = {name: metric_of(*args) for name, args in spec.items()}
    assert unpack(msgpack.unpackb(msgpack.packb(pack(metrics)))) == metrics


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {1: ["mean", 1, 1, 1, 1, 1]},
        {"": ["mean", 1, 1, 1, 1, 1]},
        {"\x1b[2J": ["mean", 1, 1, 1, 1, 1]},
        {"m": None},
        {"m": "mean"},
        {"m": ["mean", 1, 1, 1, 1]},
        {"m": ["mean", 1, 1, 1, 1, 1, 1]},
        {"m": ["median", 1, 1, 1, 1, 1]},
        {"m": [["mean"], 1, 1, 1, 1, 1]},
        {"m": ["mean", "1", 1, 1, 1, 1]},
        {"m": ["mean", True, 1, 1, 1, 1]},
        {"m": ["mean", -1.0, 1, 1, 1, 1]},
        {"m": ["mean", math.nan, 1, 1, 1, 1]},
        {"m": ["mean", math.inf, 1, 1, 1, 1]},
        {"m": ["mean", 1, 10**400, 1, 1, 1]},
    ],
)
def test_a_message_of_the_wrong_shape_is_refused(message):
    with pytest.raises(ValueError, match="metric"):
        unpack(message)


def test_a_wrong_message_is_refused_with_the_metric_named():
    with pytest.raises(ValueError, match=r"'reward/mean'.*expected"):
        unpack({"reward/mean": ["mean"]})


def test_merge_leaves_the_workers_own_metrics_alone():
    part = {"m": metric_of(Reduce.SUM, [(1.0, 1.0)])}
    assert merge([part, part])["m"].value == 2.0
    assert part["m"].value == 1.0


def test_workers_that_disagree_on_a_reducer_are_refused():
    with pytest.raises(ValueError, match=r"'tokens'.*mean.*sum"):
        merge([{"tokens": Metric(Reduce.MEAN)}, {"tokens": Metric(Reduce.SUM)}])


def test_values_are_none_where_no_worker_had_a_row():
    assert values({"b": Metric(Reduce.MEAN), "a": metric_of(Reduce.MAX, [(2.0, 1.0)])}) == {
        "a": 2.0,
        "b": None,
    }


def test_records_come_back_as_written_and_a_second_run_appends(url):
    records = [
        train(1, tokens=3.0),
        Record(step=1, phase="validation", seconds=0.1, metrics={"reward/mean": 0.5}),
    ]
    for record in records:
        MetricsLog(url).write(record)
    assert read_metrics(url) == records


def test_every_line_is_in_the_file_as_soon_as_it_is_written(url):
    log = MetricsLog(url)
    for step in (1, 2, 3):
        log.write(train(step))
        assert [record["step"] for record in read_metrics(url)] == list(range(1, step + 1))


def test_nan_and_infinity_are_written_as_null(url):
    MetricsLog(url).write(train(1, a=math.nan, b=-math.inf, c=None, d=1.0))
    line = fsspec.open(f"{url}/metrics.jsonl").open().read()
    assert json.loads(line, parse_constant=pytest.fail)["metrics"] == {
        "a": None,
        "b": None,
        "c": None,
        "d": 1.0,
    }
    assert read_metrics(url) == [train(1, a=None, b=None, c=None, d=1.0)]


def test_a_line_cut_short_is_left_out(url):
    MetricsLog(url).write(train(1))
    fs, path = fsspec.core.url_to_fs(f"{url}/metrics.jsonl")
    fs.pipe_file(path, fs.cat_file(path) + b'{"step": 2, "pha')
    assert read_metrics(url) == [train(1)]
    MetricsLog(url).write(train(2))
    assert read_metrics(url) == [train(1), train(2)]


def test_of_a_step_that_was_done_again_the_later_record_counts(url):
    log = MetricsLog(url)
    for step, loss in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)]:
        log.write(train(step, loss=loss))
    assert [(r["step"], r["metrics"]["loss"]) for r in read_metrics(url)] == [
        (1, 0.1),
        (2, 0.4),
        (3, 0.3),
    ]


@pytest.mark.parametrize(
    "line", [b"not json", b"[]", b'{"step": 1}', b'{"step":1,"phase":"x","seconds":1,"metrics":{}}']
)
def test_a_damaged_line_is_an_error_that_names_file_and_line(url, line):
    MetricsLog(url).write(train(1))
    fs, path = fsspec.core.url_to_fs(f"{url}/metrics.jsonl")
    fs.pipe_file(path, fs.cat_file(path) + line + b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_metrics(url)


def test_a_run_without_metrics_is_a_clear_error(url):
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        read_metrics(url)
