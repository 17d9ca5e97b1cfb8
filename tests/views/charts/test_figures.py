"""Numbers, bytes and times in few digits."""

import pytest

from siirl_dask.views.charts.figures import duration, number, numbers, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0"), (0.5, "0.5"), (0.91234, "0.912"), (12.345, "12.3"), (100.0, "100"), (999.62, "999.6"),
        (56_789, "56,789"), (123_456, "123.5k"), (2_714_900, "2.715M"), (-3.2, "-3.2"), (2.31e-13, "2.31e-13"),
        (1e-5, "1e-5"), (1e20, "1e+20"),
    ],
)  # fmt: skip
def test_a_number_has_three_or_four_digits_that_count(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (999_999, "1 MB"), (2_714_500, "2.71 MB")],
)
def test_bytes_have_a_unit(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.0012, "1.2 ms"), (0.05, "50 ms"), (0.0996, "0.0996 s"), (1.234, "1.23 s"), (59.99, "60 s"),
        (91.9, "1 min 31 s"), (3599, "1 h 0 min"), (3660, "1 h 1 min"), (86_400 * 3 + 3600, "3 d 1 h"),
    ],
)  # fmt: skip
def test_times_are_those_that_people_read(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.1, 0.2], ["0.1", "0.2"]), ([10.9, 10.95, 11.0], ["10.9", "10.95", "11"]),
        ([2_715_100, 2_715_200], ["2.7151M", "2.7152M"]), ([1000.5, 1001.0, 1001.5], ["1,000.5", "1,001.0", "1,001.5"]),
        ([3.0, 3.0], ["3", "3"]),
    ],
)  # fmt: skip
def test_numbers_of_an_axis_can_be_told_apart(values, texts):
    assert numbers(values) == texts
