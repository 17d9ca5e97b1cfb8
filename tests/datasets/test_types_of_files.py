"""Files whose types go together are one table; a type that would write a value otherwise, or that no
run moves, is refused with what to do.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.dataloader import Source, open_source
from siirl_dask.coordinator.source import exists
from siirl_dask.datasets import ColumnMapping, ImportRequest, import_data
from siirl_dask.errors import DataError


def imported(source, *, to, **how):
    return import_data(ImportRequest(sources=[source], to=str(to), **how))


FEW = pa.struct({"a": pa.int64()})
MORE = pa.struct({"b": pa.string(), "a": pa.int64()})
FITTING = {
    "fields": (FEW, MORE),
    "items": (pa.list_(FEW), pa.list_(MORE)),
    "no items": (pa.list_(pa.null()), pa.list_(MORE)),
    "wider": (pa.struct({"a": pa.int8()}), FEW),
    "decimals": (pa.decimal128(5, 2), pa.decimal128(9, 2)),
}
CHANGING = {
    "5 is 5.0": (pa.int64(), pa.float64()),
    "5 is 5.0 in a struct of more": (FEW, pa.struct({"b": pa.int64(), "a": pa.float64()})),
    "5 is 5.00": (pa.int64(), pa.decimal128(5, 2)),
    "1.10 is 1.1": (pa.decimal128(5, 2), pa.float64()),
    "1.10 is 1.100": (pa.decimal128(5, 2), pa.decimal128(9, 3)),
    "a text is bytes": (pa.string(), pa.binary()),
    "a text is bytes in a list": (pa.list_(pa.string()), pa.list_(pa.binary())),
}


def with_types(folder, kinds):
    folder.mkdir()
    for number, kind in enumerate(kinds):
        rows = pa.table({"prompt": [f"{number}"], "answer": pa.nulls(1, kind)})
        pq.write_table(rows, folder / f"{number}.parquet")
    return str(folder)


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("turned", [False, True])
def test_a_folder_of_types_that_go_together_is_imported_and_a_run_names_the_command(
    name, turned, tmp_path
):
    kinds = FITTING[name][::-1] if turned else FITTING[name]
    folder = with_types(tmp_path / "of two", kinds)
    with pytest.raises(DataError, match=r"siirl-dask data import '.*of two' '.*of two-table'"):
        open_source(Source(url=folder, prompt="prompt", answer="answer"))
    table = imported(folder, to=tmp_path / "of two-table")
    assert table.num_rows == 2
    again = imported(f"{folder}/*.parquet", to=tmp_path / "again")
    assert again.to_table().equals(table.to_table())


@pytest.mark.parametrize("kind", [pa.decimal128(5, 2), pa.list_(pa.decimal256(50, 1))])
def test_a_type_that_no_run_moves_is_refused_with_the_command_that_changes_it(kind, tmp_path):
    file = str(tmp_path / "of money.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"], "price": pa.nulls(1, kind)}), file)
    said = "siirl-dask data import '.*of money.parquet' TABLE --drop price"
    with pytest.raises(DataError, match=rf"dataset '.*of money.parquet': column 'price'.*{said}"):
        open_source(Source(url=file, prompt="prompt", answer="answer"))
    table = imported(file, to=tmp_path / "table", mapping=ColumnMapping(drop=["price"]))
    open_source(Source(url=table.base, prompt="prompt", answer="answer"))


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("turned", [False, True])
def test_types_in_one_of_which_a_value_is_written_otherwise_are_refused(name, turned, tmp_path):
    kinds = CHANGING[name][::-1] if turned else CHANGING[name]
    folder = with_types(tmp_path / "rows", kinds)
    with pytest.raises(DataError, match=r"column 'answer' is .*give it a type, as in --type"):
        imported(folder, to=tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("pattern", ["*.parquet", "[0-9].parquet", "?.*"])
def test_a_pattern_is_no_dataset_and_is_refused_with_the_command_that_reads_it(pattern, tmp_path):
    url = f"{with_types(tmp_path / 'of two', [pa.string(), pa.string()])}/{pattern}"
    source = Source(url=url, prompt="prompt", answer="answer")
    for look in (open_source, lambda source: exists(source.url)):
        with pytest.raises(DataError, match=r"is a pattern of 2 files.*\n.*data import '.*' TABLE"):
            look(source)
    assert imported(url, to=tmp_path / "table").num_rows == 2
    literal = tmp_path / "a[1]*"
    with_types(literal, [pa.string()])
    open_source(Source(url=str(literal), prompt="prompt", answer="answer"))
