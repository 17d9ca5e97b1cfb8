"""Axes of charts: round numbers, all of them within, and the last step among them."""

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.views.charts.colours import COLOURS, class_of, tint
from siirl_dask.views.charts.line_chart import ticks
from siirl_dask.views.charts.series import Curve, thin

NUMBERS = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(NUMBERS, st.floats(1e-9, 1e12), st.integers(4, 9))
def test_an_axis_has_a_few_marks_evenly_apart(low, extent, most):
    high = low + extent
    if low == high:
        return
    marks = ticks(low, high, most)
    assert 1 <= len(marks) <= most
    assert all(low <= mark <= high for mark in marks)
    assert marks == sorted(marks)


def test_an_axis_of_steps_has_whole_numbers_and_the_last_step():
    assert ticks(0, 3, 7, least=1.0) == [0, 1, 2, 3]
    assert ticks(1, 60, 7, least=1.0) == [10, 20, 30, 40, 50, 60]
    assert ticks(0.5, 1.5, 7, least=1.0) == [1]


def test_a_curve_with_a_spread_has_a_band_and_its_points_its_steps():
    series = [(step, float(step)) for step in range(1, 9)]
    curve = Curve("a", thin(series, 4, {1: 0.5, 8: 2.0}), newest=8.0)
    assert (curve.steps, curve.values) == ([1, 3, 5, 7], [1.5, 3.5, 5.5, 7.5])
    assert (curve.low[0], curve.high[-1]) == (0.5, 10.0)
    assert curve.has_band
    assert not Curve("a", thin(series, 8), newest=8.0).has_band


def test_colours_come_again_dashed_and_a_tint_is_nearly_white():
    assert [class_of(number) for number in (0, 7, 8)] == ["r0", "r7", "r0 dash"]
    assert tint("#0072b2", 0.0) == "#ffffff"
    assert tint("#0072b2", 1.0) == "#0072b2"
    assert len({colour.light for colour in COLOURS} | {colour.dark for colour in COLOURS}) == 16
