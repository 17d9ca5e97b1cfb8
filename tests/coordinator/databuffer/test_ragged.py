import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.ragged import (
    CopyPlan,
    as_ragged,
    build_column,
    element_width,
    starts_of,
)

KINDS = {
    pa.list_(pa.int32()): st.lists(st.integers(-5, 5), max_size=6),
    pa.large_list(pa.float64()): st.lists(st.floats(allow_nan=False), max_size=6),
    pa.list_(pa.int8()): st.lists(st.integers(-5, 5), max_size=6),
    pa.string(): st.text(max_size=6),
    pa.large_binary(): st.binary(max_size=6),
    pa.list_(pa.timestamp("us")): st.lists(st.integers(0, 5), max_size=3),
}


@given(st.data(), st.sampled_from(list(KINDS)))
def test_rows_copied_from_a_slice_equal_what_arrow_takes(data, kind):
    array = pa.array(data.draw(st.lists(KINDS[kind], max_size=12)), kind)
    array = array.slice(data.draw(st.integers(0, 5)), data.draw(st.integers(0, 12)))
    picked = np.array(
        data.draw(st.lists(st.integers(0, len(array) - 1), max_size=20)) if len(array) else [],
        np.int64,
    )
    ragged = as_ragged(array)
    lengths = ragged.lengths[picked]
    out = np.zeros(int(lengths.sum()) * ragged.width, np.uint8)
    CopyPlan(starts_of(ragged.lengths)[picked], starts_of(lengths), lengths).copy(
        ragged.values, out, ragged.width
    )
    back = build_column(kind, ragged.lengths[picked], pa.py_buffer(out))
    back.validate(full=True)
    assert back.combine_chunks().equals(array.take(pa.array(picked)))


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.integers(1, 30),
    st.sampled_from([pa.list_(pa.int32()), pa.binary()]),
)
def test_a_column_beyond_32_bit_offsets_comes_in_chunks(sizes, most, kind):
    lengths = np.array(sizes, np.int64)
    values = np.arange(int(lengths.sum()), dtype=np.int32 if pa.types.is_list(kind) else np.uint8)
    if max(sizes, default=0) > most:
        with pytest.raises(pa.ArrowInvalid, match="holds at most"):
            build_column(kind, lengths, pa.py_buffer(values), most)
        return
    column = build_column(kind, lengths, pa.py_buffer(values), most)
    column.validate(full=True)
    rows = np.split(values, np.cumsum(lengths)[:-1]) if sizes else []
    assert [list(row) for row in column.to_pylist()] == [row.tolist() for row in rows]
    assert all(sum(map(len, chunk.to_pylist())) <= most for chunk in column.chunks)
    large = build_column(
        pa.large_list(pa.int32()), lengths, pa.py_buffer(values.astype(np.int32)), most
    )
    assert large.num_chunks == 1


@pytest.mark.parametrize("longest", [3, 400, 5000])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shift", [0, 1])
def test_long_and_short_rows_are_copied_to_their_places(longest, width, shift):
    rng = np.random.default_rng(longest)
    sizes = rng.integers(0, longest, 300)
    total = int(sizes.sum()) * width
    source = rng.integers(0, 256, total + shift, dtype=np.uint8)[shift:]  # perhaps not aligned
    order = rng.permutation(300)
    places = np.empty(300, np.int64)
    places[order] = starts_of(sizes[order])
    target = np.zeros(total, np.uint8)
    CopyPlan(starts_of(sizes), places, sizes).copy(source, target, width)
    rows = np.split(source, starts_of(sizes)[1:] * width)
    assert target.tobytes() == b"".join(rows[i].tobytes() for i in order)


@given(
    st.lists(st.tuples(*[st.integers(-10, 60)] * 3), min_size=1, max_size=5),
    st.sampled_from([1, 3]),
)
def test_rows_outside_of_memory_are_refused_before_any_is_copied(rows, width):
    starts, places, sizes = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    source, target = np.ones(50 * width, np.uint8), np.zeros(41 * width - 1, np.uint8)
    if all(min(s, p, n) >= 0 and s + n <= 50 and p + n <= 40 for s, p, n in rows):
        CopyPlan(starts, places, sizes).copy(source, target, width)
    else:
        with pytest.raises(IndexError):
            CopyPlan(starts, places, sizes).copy(source, target, width)
        assert not target.any()


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1], None]),
        pa.array([[1, None]]),
        pa.array(["a", None]),
        pa.array([1, 2]),
        pa.array([[True]]),
        pa.array([[[1]]]),
        pa.array([{"a": 1}]),
        pa.array([None]),
    ],
)
def test_columns_of_other_types_or_with_nulls_are_not_ragged(array):
    assert as_ragged(array) is None


def test_the_width_is_the_bytes_of_one_element():
    assert [element_width(kind) for kind in (pa.list_(pa.int32()), pa.string(), pa.int64(), pa.list_(pa.bool_()))] == [
        4, 1, None, None,
    ]  # fmt: skip
