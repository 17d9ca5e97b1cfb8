"""Metrics of single agents have their places in charts, headlines and warnings; those of a run
with one stay.
"""

from siirl_dask.observe.drift import Drift
from siirl_dask.observe.metrics import Record
from siirl_dask.planner import Phase
from siirl_dask.views.charts.curves import PANELS, curves, other_metrics
from siirl_dask.views.charts.headlines import HEADLINES, headlines_of


def record(step, **metrics):
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Record(step=step, phase=Phase.TRAIN, seconds=1.0, metrics=named)


TWO = [
    record(step, a__policy__entropy=1.0, b__policy__entropy=2.0, reward__mean=0.5)
    for step in (1, 2)
]
ONE = [record(step, policy__entropy=1.0, policy__loss=2.0, reward__mean=0.5) for step in (1, 2)]


def test_a_panel_has_a_line_for_each_agent():
    drawn = {
        panel.title: {line.label: line.values for line in curves(TWO, panel)} for panel in PANELS
    }
    assert drawn["entropy, nats a token"] == {"a: policy": [1.0, 1.0], "b: policy": [2.0, 2.0]}
    assert drawn["reward"] == {"mean": [0.5, 0.5]}
    assert other_metrics(TWO) == []


def test_headlines_name_the_agent_and_stay_as_they_are_with_one():
    told = headlines_of(TWO)
    assert told[Phase.TRAIN, "a/policy/entropy"] == "a: policy entropy (nats per token)"
    assert headlines_of(ONE) == HEADLINES


def test_what_drifts_is_said_with_the_agents_name():
    drift, said = Drift(), []
    for step in range(1, 40):
        said += drift.note(
            record(step, a__policy__entropy=1.0, b__policy__entropy=1.0 if step < 20 else 0.01)
        )
    assert [text.split(" has")[0] for text in said] == ["b: entropy"]
    skipped = Drift().note(record(1, a__policy__skipped_steps=2.0))
    assert "(a/policy/skipped_steps counts them" in skipped[0]
