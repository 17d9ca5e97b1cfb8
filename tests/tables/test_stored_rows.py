"""Whoever reads the rows of a step gets each of them once, however many workers wrote them and
however many read.
"""

from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from siirl_storage import commit_parts, stage_part

from siirl_dask.errors import DataError
from siirl_dask.tables import read_kept_rows, read_stored_rows

SCHEMA = pa.schema({"group_id": pa.int64(), "row_id": pa.int64(), "text": pa.large_string()})
WRITTEN = pa.schema({"row_id": pa.int64(), "text": pa.string(), "group_id": pa.int64()})
"""As an earlier version stored them: in another order, and with a type that is cast."""
ENOUGH = 2**20  # bytes


def rows_of(groups):
    count = len(groups)
    columns = {"row_id": range(count), "text": [f"t{row}" for row in range(count)]}
    return pa.table({**columns, "group_id": groups}, schema=WRITTEN)


def store(folder, table, sizes, rows_per_group):
    """Store the rows of a step in parts of these sizes."""
    ends = np.cumsum(sizes)
    parts = [
        stage_part(folder, 1, index, table.slice(end - size, size), rows_per_group=rows_per_group)
        for index, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    commit_parts(folder, 1, parts)


SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=4)
GROUPS = st.lists(st.integers(0, 4), min_size=28, max_size=28)


@given(sizes=SIZES, groups=GROUPS, readers=st.integers(1, 5), per_group=st.integers(1, 4))
def test_each_stored_row_has_one_reader(sizes, groups, readers, per_group):
    table = rows_of(groups[: sum(sizes)])
    with TemporaryDirectory() as folder:
        store(folder, table, sizes, per_group)
        shares = [read_stored_rows(folder, SCHEMA, at, readers, ENOUGH) for at in range(readers)]
    assert all(share.schema.equals(SCHEMA) for share in shares)
    whole = table.select(SCHEMA.names).cast(SCHEMA)
    assert pa.concat_tables(shares).equals(whole)
    rows = [share.num_rows for share in shares]
    if readers == len(sizes):
        assert rows == sizes
    else:
        assert max(rows) - min(rows) <= 1


@given(sizes=SIZES, groups=GROUPS, readers=st.integers(1, 5), kept=st.booleans())
def test_rows_of_a_group_have_one_reader_where_as_many_read_as_wrote_or_not(
    sizes, groups, readers, kept
):
    table = rows_of(groups[: sum(sizes)])
    with TemporaryDirectory() as folder:
        store(folder, table, sizes, 3)
        if kept:
            found = [read_kept_rows(folder, at, readers, ENOUGH) for at in range(readers)]
            shares = [WRITTEN.empty_table() if share is None else share for share in found]
        else:
            shares = [
                read_stored_rows(folder, WRITTEN, at, readers, ENOUGH, whole=True)
                for at in range(readers)
            ]
    assert pa.concat_tables(shares).sort_by("row_id").equals(table.combine_chunks())
    if readers == len(sizes):
        assert [share.num_rows for share in shares] == sizes
        return
    readers_of_group = [{*share["group_id"].to_pylist()} for share in shares]
    assert sum(map(len, readers_of_group)) == len(set.union(*readers_of_group))


def test_rows_without_a_column_that_is_read_are_refused_and_a_step_without_rows_has_none(tmp_path):
    store(str(tmp_path), rows_of([0, 1]).drop_columns(["text"]), [2], 4)
    with pytest.raises(DataError, match=r"holds rows without \['text'\]"):
        read_stored_rows(str(tmp_path), SCHEMA, 0, 1, ENOUGH)
    with pytest.raises(DataError, match="no rows that are whole"):
        read_stored_rows(str(tmp_path / "other"), SCHEMA, 0, 1, ENOUGH)
    store(str(tmp_path / "none"), rows_of([]), [0, 0], 4)
    assert read_kept_rows(str(tmp_path / "none"), 0, 2, ENOUGH) is None
