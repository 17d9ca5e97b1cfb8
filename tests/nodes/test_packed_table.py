import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.nodes.packed_table import packed, ragged, values

LISTS = pa.list_(pa.int32())


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8), st.integers(0, 4))
def test_a_list_column_becomes_values_and_offsets_and_comes_back(rows, start):
    column = pa.chunked_array([pa.array(rows, LISTS)]).slice(start)
    flat, offsets = packed(column)
    assert flat.tolist() == [value for row in rows[start:] for value in row]
    assert offsets.tolist()[0] == 0
    assert offsets.dtype == torch.int64
    assert ragged(flat, offsets, LISTS).to_pylist() == rows[start:]


def test_the_values_of_one_chunk_are_not_copied():
    array = pa.array([[1, 2], [3]], LISTS)
    flat, _ = packed(pa.chunked_array([array]))
    assert flat.data_ptr() == array.values.buffers()[1].address


def test_chunks_are_joined():
    column = pa.chunked_array([pa.array([[1]], LISTS), pa.array([[2, 3]], LISTS)])
    assert packed(column)[1].tolist() == [0, 1, 3]
    assert values(pa.chunked_array([pa.array([1.0]), pa.array([2.0])])).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("read", [packed, values])
def test_a_null_is_refused(read):
    column = pa.chunked_array([pa.array([[1], None], LISTS) if read is packed else pa.array([1.0, None])])
    with pytest.raises(ValueError, match="null"):
        read(column)


def test_a_column_beyond_two_billion_elements_is_packed_and_made_again():
    """16,384 rows of 128k tokens are more than offsets of 32 bits can tell: booleans of eight to the byte, here."""
    rows, length = 8, 2**28 + 1
    bits = pa.Array.from_buffers(pa.bool_(), length, [None, pa.py_buffer(bytes(length // 8 + 1))])
    ends = pa.array([0, length], pa.int64())
    row = pa.LargeListArray.from_arrays(ends, bits)
    column = pa.chunked_array([row] * rows)
    joined = packed_table._one_chunk(column)
    assert len(joined.values) == rows * length > 2**31
    offsets = torch.arange(rows + 1) * length
    assert joined.offsets.to_pylist() == offsets.tolist()
