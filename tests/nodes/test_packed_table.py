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
