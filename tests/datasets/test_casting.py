"""A value that another type would change is refused, of whatever type it is."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.datasets.casting import cast

NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
]


def made(value, kind, to):
    return cast(pa.chunked_array([pa.array([value], kind)]), to)[0].as_py()


@given(
    number=st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 1, 2049, 65520, 2**24 + 1]),
    kind=st.sampled_from(NUMBERS),
    to=st.sampled_from([*NUMBERS, pa.bool_()]),
)
def test_a_whole_number_stays_what_it_is_in_another_type_or_is_refused(number, kind, to):
    try:
        stored = pa.array([number], kind)[0].as_py()
    except (pa.ArrowInvalid, OverflowError):
        return
    try:
        result = made(number, kind, to)
    except (pa.ArrowException, ValueError):
        return
    assert result == stored


@pytest.mark.parametrize(
    ("value", "kind", "to"),
    [
        (2, pa.int64(), pa.bool_()),
        (-1, pa.int8(), pa.bool_()),
        (2.5, pa.float64(), pa.bool_()),
        (0.5, pa.float32(), pa.bool_()),
        (100_000, pa.int64(), pa.float16()),
        (2049, pa.int64(), pa.float16()),
        (2.0**24 + 1, pa.float64(), pa.float32()),
        (Decimal(2**53 + 1), pa.decimal128(20, 0), pa.float64()),
    ],
)
def test_a_number_that_does_not_fit_is_refused_and_not_rounded(value, kind, to):
    with pytest.raises((pa.ArrowException, ValueError)):
        made(value, kind, to)


@pytest.mark.parametrize(
    ("value", "kind", "to", "expected"),
    [
        (1, pa.int64(), pa.bool_(), True),
        (0.0, pa.float64(), pa.bool_(), False),
        (None, pa.float64(), pa.bool_(), None),
        (0.1, pa.float64(), pa.float32(), pytest.approx(0.1)),
        (float("inf"), pa.float64(), pa.float16(), float("inf")),
        (Decimal("1.10"), pa.decimal128(5, 2), pa.float64(), 1.1),
        (None, pa.decimal128(5, 2), pa.float64(), None),
    ],
)
def test_others_come_out_as_the_nearest(value, kind, to, expected):
    assert made(value, kind, to) == expected


def test_nan_stays_nan():
    assert str(made(float("nan"), pa.float64(), pa.float32())) == "nan"
