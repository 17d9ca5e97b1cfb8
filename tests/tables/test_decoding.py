"""Values of nested dictionaries, runs and list views are decoded one by one, whatever part of an
array they are taken from.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.schema import decoded
from siirl_dask.tables import decode_array, needs_decoding

WORDS = st.none() | st.sampled_from(["a", "b", "longer"])


@st.composite
def lengths(draw, rows, most):
    """Ends of rows in an array of ``most`` items, and which rows are null."""
    ends = sorted(draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)))
    null = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    return [0, *ends], null


@st.composite
def arrays(draw, rows, depth=2):
    """An array of some rows, of types that Arrow does not cast and of those around them."""
    kinds = ["runs", "runs", "words", "dictionary"]
    if depth:
        kinds = ["list", "large_list", "list_view", "large_list_view", "fixed", "struct", "part"]
    kind = draw(st.sampled_from(kinds))
    if kind == "part":
        longer = draw(arrays(rows + 3, depth - 1))
        return longer.slice(draw(st.integers(0, 3)), rows)
    if kind in ("words", "runs", "dictionary"):
        words = pa.array(draw(st.lists(WORDS, min_size=rows, max_size=rows)), pa.string())
        if kind == "runs":
            return pc.run_end_encode(words)
        return words.dictionary_encode() if kind == "dictionary" else words
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(draw(arrays(2 * rows, depth - 1)), 2)
    if kind == "struct":
        fields = [draw(arrays(rows, depth - 1)) for _ in range(2)]
        return pa.StructArray.from_arrays(fields, ["one", "other"])
    items = draw(arrays(draw(st.integers(0, 6)), draw(st.integers(0, depth - 1))))
    ends, null = draw(lengths(rows, len(items)))
    if kind in ("list", "large_list"):
        make = pa.ListArray if kind == "list" else pa.LargeListArray
        offsets = pa.array(ends, pa.int32() if kind == "list" else pa.int64())
        return make.from_arrays(offsets, items, mask=pa.array(null, pa.bool_()))
    large = kind == "large_list_view"
    number = pa.int64() if large else pa.int32()
    order = draw(st.permutations(range(rows)))
    starts = np.array(ends[:-1], np.int64)[order]
    sizes = np.diff(ends)[order]
    make = pa.LargeListViewArray if large else pa.ListViewArray
    return make.from_arrays(
        pa.array(starts, number), pa.array(sizes, number), items, mask=pa.array(null, pa.bool_())
    )


@settings(max_examples=200)
@given(st.data(), st.integers(0, 6))
def test_every_part_of_an_array_is_decoded_to_its_own_values(data, rows):
    array = data.draw(arrays(rows))
    first = data.draw(st.integers(0, rows))
    part = array.slice(first, data.draw(st.integers(0, rows - first)))
    found = decode_array(part, decoded(array.type))
    found.validate(full=True)
    assert found.type == decoded(array.type)
    assert found.to_pylist() == part.to_pylist()


@given(st.data())
def test_a_type_needs_decoding_where_any_type_in_it_has_runs_or_list_views(data):
    kind = data.draw(arrays(1, depth=3)).type
    named = str(kind)
    assert needs_decoding(kind) == ("run_end_encoded" in named or "list_view" in named)
    assert not needs_decoding(decoded(kind))
