"""Thinned curves: fewer points, none of whose values is hidden, in a chart and in a line of
text.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.observe import Record
from siirl_dask.planner import Phase
from siirl_dask.views.charts.headlines import SECONDS
from siirl_dask.views.charts.series import series_of, thin
from siirl_dask.views.charts.sparkline import sparkline

series = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=300).map(
    lambda values: list(enumerate(values, 1))
)


@given(series, st.integers(1, 40))
def test_no_value_of_any_step_lies_outside_of_its_point(pairs, most):
    points = thin(pairs, most)
    assert len(points) == min(most, len(pairs))
    for step, value in pairs:
        (own,) = [point for point in points if point.first <= step <= point.last]
        assert own.low <= value <= own.high
        assert own.low <= own.mean <= own.high
    assert [point.first for point in points] == sorted({point.first for point in points})
    values = [value for _, value in pairs]
    if points:
        assert min(point.low for point in points) == min(values)
        assert max(point.high for point in points) == max(values)


@given(series, st.integers(1, 40))
def test_a_sparkline_is_as_wide_as_asked_and_goes_from_the_lowest_to_the_highest_block(
    pairs, width
):
    line = sparkline(pairs, width)
    assert len(line) == min(width, len(pairs))
    means = [point.mean for point in thin(pairs, width)]
    if len(set(means)) > 1:
        assert line[means.index(min(means))] == "▁"
        assert line[means.index(max(means))] == "█"
    else:
        assert set(line) <= {"▄"}


def test_a_series_has_the_steps_of_its_phase_that_logged_a_value():
    records = [
        Record(step=1, phase=Phase.TRAIN, seconds=2.0, metrics={"reward/mean": 0.5, "loss": None}),
        Record(step=1, phase=Phase.VALIDATION, seconds=9.0, metrics={"reward/mean": 0.7}),
        Record(step=2, phase=Phase.TRAIN, seconds=3.0, metrics={}),
    ]
    assert series_of(records, Phase.TRAIN, "reward/mean") == [(1, 0.5)]
    assert series_of(records, Phase.VALIDATION, "reward/mean") == [(1, 0.7)]
    assert series_of(records, Phase.TRAIN, SECONDS) == [(1, 2.0), (2, 3.0)]
    assert series_of(records, Phase.TRAIN, "loss") == []


@pytest.mark.parametrize("value", [0.0, -3.5, 1e308])
def test_a_single_step_is_one_point(value):
    (point,) = thin([(7, value)], 100)
    assert (point.step, point.mean, point.low, point.high) == (7, value, value, value)
