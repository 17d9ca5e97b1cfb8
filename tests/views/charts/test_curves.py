"""Curves of a run's records: what was logged is drawn, what was not is not, and a long run stays
small.
"""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from siirl_dask.observe.metrics import Record
from siirl_dask.planner import Phase
from siirl_dask.views.charts.curves import PANELS, Line, curve, curves, other_metrics
from siirl_dask.views.dashboard.records import merged, thinned

PHASES = st.sampled_from([Phase.TRAIN, Phase.TRAIN, Phase.TRAIN, Phase.VALIDATION, Phase.TEST])


def record(step, phase=Phase.TRAIN, **metrics):
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Record(step=step, phase=phase, seconds=1.0, metrics=named)


@given(st.lists(PHASES, max_size=80), st.integers(4, 40))
# fewer steps of training than room for them
@example([Phase.VALIDATION] * 3 + [Phase.TRAIN] * 2, 4)
def test_a_long_run_keeps_its_newest_half_its_order_and_at_most_so_many(phases, most):
    records = [record(step, phase) for step, phase in enumerate(phases)]
    kept = thinned(records, most)
    assert len(kept) == min(len(records), most)
    assert kept[-(most // 2) :] == records[-(most // 2) :]
    steps = [one["step"] for one in kept]
    assert steps == sorted(set(steps))
    assert thinned(kept, most) == kept


def test_rare_validations_outlive_steps_of_training():
    records = [
        record(step, Phase.VALIDATION if step % 10 == 0 else Phase.TRAIN) for step in range(400)
    ]
    kept = thinned(records, 200)
    assert sum(one["phase"] is Phase.VALIDATION for one in kept) == 40


def test_values_that_are_not_finite_or_not_there_leave_a_gap_and_the_spread_is_a_band():
    logged = [(1, 0.5, 0.1), (2, math.nan, 0.1), (3, None, None), (4, 0.7, None)]
    records = [record(step, reward__mean=mean, reward__std=std) for step, mean, std in logged]
    found = curve(
        [*records, record(9, Phase.TEST, reward__mean=0.9)],
        Line("reward/mean", spread="reward/std"),
    )
    assert (found.steps, found.values) == ([1, 4], [0.5, 0.7])
    assert (found.low, found.high) == ([0.4, 0.7], [0.6, 0.7])


def test_a_panel_shows_what_was_logged_and_other_metrics_are_those_of_no_panel():
    records = [
        record(0, Phase.VALIDATION, reward__mean=0.2),
        record(1, reward__mean=0.1, seconds__update=2.0),
    ]
    shown = {panel.title: [line.label for line in curves(records, panel)] for panel in PANELS}
    assert shown["validation"] == ["validation"]
    assert shown["reward"] == ["mean"]
    assert shown["clip fraction"] == []
    assert other_metrics(records) == ["seconds/update"]


def test_what_was_told_later_counts_where_a_step_was_done_twice():
    earlier, later = (
        [record(1, loss=1.0), record(2, loss=1.0)],
        [record(2, loss=2.0), record(3, loss=2.0)],
    )
    assert [(one["step"], one["metrics"]["loss"]) for one in merged(earlier, later)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 2.0),
    ]
