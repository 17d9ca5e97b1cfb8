"""Prometheus is told of each moment once, and of each metric as the driver merges it, in bounded
memory.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.context import Metric, Reduce
from siirl_dask.observe.metrics import merge, pack, values
from siirl_dask.observe.trace.bottleneck import chain_times
from siirl_dask.observe.trace.trace_table import TraceSpan
from siirl_dask.scheduler.run_meter import RunMeter, StepMerger
from siirl_dask.trace import Entry, Lane
from siirl_dask.worker.monitoring import prometheus
from siirl_dask.worker.monitoring.prometheus import FAMILIES, Exporter
from siirl_dask.worker.monitoring.worker_meter import WorkerMeter
from tests.grafana import BOARD, queries

ROOT = Path(__file__).parents[2]


def sampled(meter):
    return {(name, labels): value for name, labels, value in meter.samples()}


@st.composite
def chains(draw):
    """Spans of a chain in the order in which they end, each within another one or after it."""
    entries = []

    def span(start, depth):
        end = start
        for _ in range(draw(st.integers(0, 3 if depth else 0))):
            end = span(end + draw(st.integers(0, 5)), depth - 1)
        end += draw(st.integers(1, 9))
        lane = draw(st.sampled_from([Lane.COMPUTE, Lane.WAIT, Lane.TRANSFER]))
        entries.append(Entry(lane, "node", "x", False, "train", 0, start, end - start, None))
        return end

    at = 0
    for _ in range(draw(st.integers(1, 4))):
        task = len(entries)
        end = span(at + 1, 2)
        entries.append(
            Entry(Lane.CONTROL, "task", "train", False, "train", 0, at, end + 1 - at, None)
        )
        entries.insert(
            draw(st.integers(task, len(entries))),
            Entry(Lane.WAIT, "beside", "x", True, "", 0, at, 3, None),
        )
        at = end + 1 + draw(st.integers(0, 5))
    return entries


@given(entries=chains(), cut=st.integers(0, 40))
def test_each_moment_of_a_chain_counts_once_in_the_lane_that_the_trace_says(entries, cut):
    meter = WorkerMeter("mine", "0")
    meter.spans(entries[:cut])
    meter.spans(entries[cut:])  # of one step, drained in two parts
    expected = dict.fromkeys(map(str, Lane), 0.0)
    for span, left in chain_times([TraceSpan(1, "0", *entry) for entry in entries]):
        expected[str(span.lane)] += left / 1e9
    found = {
        labels[-1]: value for (name, labels), value in sampled(meter).items() if "lane" in name
    }
    assert found == pytest.approx(
        {lane: value for lane, value in expected.items() if lane in found}
    )
    assert sum(found.values()) == pytest.approx(sum(expected.values()))


def logged(reward, std, samples):
    metrics = {
        "reward/mean": Metric(Reduce.MEAN),
        "reward/std": Metric(Reduce.STD),
        "samples": Metric(Reduce.SUM),
    }
    metrics["reward/mean"].add(reward, samples)
    metrics["reward/std"].add(std, samples)
    metrics["samples"].add(samples)
    metrics["something/else"] = Metric(Reduce.MAX, 1, 2, 3, 4, 5)
    return metrics


def report(sequence, phase, step, metrics):
    return {
        "kind": "done",
        "sequence": sequence,
        "phase": phase,
        "step": step,
        "metrics": pack(metrics),
    }


def test_the_scheduler_has_the_numbers_of_the_driver_once_all_workers_have_reported():
    meter = RunMeter("mine")
    merger = StepMerger(meter, 2)
    parts = [logged(0.25, 1.0, 10), logged(0.75, 3.0, 30)]
    merger.take(report(5, "train", 4, parts[0]))
    assert sampled(meter) == {("siirl_run_workers", ("mine",)): 2}
    merger.take(report(6, "validation", 4, logged(0.5, 0.0, 7)))  # a worker may be ahead
    merger.take(report(5, "train", 4, parts[1]))
    merger.take(report(6, "validation", 4, logged(0.5, 0.0, 7)))
    expected = values(merge(parts))
    assert sampled(meter) == {
        ("siirl_run_workers", ("mine",)): 2,
        ("siirl_run_step", ("mine",)): 4,
        ("siirl_run_reward", ("mine",)): pytest.approx(expected["reward/mean"]),
        ("siirl_run_reward_std", ("mine",)): pytest.approx(expected["reward/std"]),
        ("siirl_run_validation_reward", ("mine",)): 0.5,
        ("siirl_run_samples", ("mine",)): 40,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "staged"},
        {"sequence": "5"},
        {"step": None},
        {"metrics": [1]},
        {"metrics": {"samples": ["sum", "1", 2, 3, 4, 5]}},
        {"metrics": {"samples": ["median", 1, 2, 3, 4, 5]}},
        {"metrics": {"samples": ["sum", float("inf"), 2, 3, 4, 5]}},
        {"metrics": {"samples": 7, 3: []}},
    ],
    ids=str,
)
def test_a_report_that_is_none_counts_for_nothing_and_raises_nothing(changed):
    meter = RunMeter("mine")
    StepMerger(meter, 1).take(report(5, "train", 4, logged(0.25, 1.0, 10)) | changed)
    assert ("siirl_run_samples", ("mine",)) not in sampled(meter)


def test_a_process_keeps_the_newest_runs_only_and_another_start_of_a_run_counts_on():
    exporter = Exporter()
    for number in range(200):
        exporter.meter(
            (f"run-{number}", "0"), lambda number=number: WorkerMeter(f"run-{number}", "0")
        ).iteration("train", {})
    again = exporter.meter(("run-199", "0"), lambda: pytest.fail("it is there"))
    again.iteration("train", {})
    family = next(
        family for family in exporter.collect() if family.name == "siirl_worker_iterations"
    )
    assert len(family.samples) == 32
    assert {sample.labels["run"]: sample.value for sample in family.samples}["run-199"] == 2


def test_without_prometheus_client_nothing_is_counted(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert prometheus.exporter.__wrapped__() is None


def test_the_page_lists_what_is_exported():
    text = (ROOT / "docs" / "monitoring.md").read_text()
    listed = dict(re.findall(r"^\| `(siirl_\w+)` \| (.*?) \|", text, re.MULTILINE))
    assert listed == {
        f"{name}_total" if family.kind == "counter" else name: ", ".join(
            f"`{label}`" for label in family.labels
        )
        for name, family in FAMILIES.items()
    }


def test_the_dashboard_is_one_that_grafana_imports():
    board = json.loads(BOARD.read_text())
    assert board["id"] is None, "Grafana gives the number itself"
    assert {"title", "uid", "schemaVersion", "version", "time", "templating"} <= board.keys()
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    places = set()
    for panel in board["panels"]:
        assert panel["type"] in ("row", "stat", "timeseries")
        assert panel["type"] == "row" or panel["targets"]
        box = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert all(x < 24 for x, _ in cells)
        assert not cells & places, panel["title"]
        places |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("(") == target["expr"].count(")")


def test_the_dashboard_asks_for_labels_that_its_metrics_have_and_shows_every_metric():
    board = json.loads(BOARD.read_text())
    asked = set()
    for query in queries(board):
        for name, labels in re.findall(r"(siirl_\w+)(?:\{(.*?)\})?", query):
            family = FAMILIES.get(name) or FAMILIES[name.removesuffix("_total")]
            assert name.endswith("_total") == (family.kind == "counter"), name
            assert {label.partition("=")[0].strip() for label in labels.split(",") if label} <= set(
                family.labels
            ), query
            asked.add(name.removesuffix("_total"))
    assert asked == set(FAMILIES)
