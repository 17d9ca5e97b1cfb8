import mmap

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.nodes import packed_table
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
    column = pa.chunked_array(
        [pa.array([[1], None], LISTS) if read is packed else pa.array([1.0, None])]
    )
    with pytest.raises(ValueError, match="null"):
        read(column)


# elements of a column: more than offsets of 32 bits can tell, as 16,384 rows of 128k tokens are
BEYOND = 2**31 + 5


def test_a_column_beyond_two_billion_elements_is_packed_and_made_again():
    """Over memory that nothing touches: elements of one byte, and no copy on either way."""
    untouched = pa.py_buffer(mmap.mmap(-1, BEYOND))
    flat = pa.Array.from_buffers(pa.int8(), BEYOND, [None, untouched])
    ends = [0, 2**20, 2**31 + 1, BEYOND]
    column = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)
    values, offsets = packed(pa.chunked_array([column]))
    assert (len(values), values.data_ptr(), offsets.tolist()) == (BEYOND, untouched.address, ends)
    again = ragged(values, offsets, pa.list_(pa.int8()))
    assert again.type == pa.large_list(pa.int8())
    assert again.offsets.to_pylist() == ends
    assert again.values.buffers()[1].address == untouched.address


def test_chunks_that_are_beyond_two_billion_elements_together_are_joined():
    # eight to the byte
    bits = pa.Array.from_buffers(pa.bool_(), 2**28 + 1, [None, pa.py_buffer(bytes(2**25 + 1))])
    small = pa.ListArray.from_arrays(pa.array([0, len(bits)], pa.int32()), bits)
    column = pa.chunked_array([small] * 8)
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        pa.concat_arrays(column.chunks)
    joined = packed_table.one_chunk(column)
    assert joined.offsets.to_pylist() == [row * len(bits) for row in range(9)]
    assert joined.offsets.to_pylist()[-1] > 2**31
