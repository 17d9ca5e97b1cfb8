"""Workers write a Dask collection as one table: whichever of them are lost, it has the same rows, and
rows that a run does not have never take their place unasked.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import dask
import dask.bag
import pyarrow as pa
import pytest
from dask.delayed import delayed
from distributed import Client, get_worker
from siirl_storage import create_table, open_table

from siirl_dask.config import Config, DataConfig, DataSource, RunConfig
from siirl_dask.driver.caller import RunCaller
from siirl_dask.driver.collection import write_dataset
from siirl_dask.driver.recovery.resume import ResumePoint
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.runs.identity_file import DataVersion
from siirl_dask.tables.content import CONTENT, content_digest
from tests.clusters import local_cluster

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]


@pytest.fixture
def client(cluster_address):
    with Client(cluster_address, set_as_default=False) as client:
        yield client


@pytest.fixture
def config(tmp_path):
    url = str(tmp_path / "run")
    return Config(run=RunConfig(url=url), data=DataConfig(url=f"{url}/data"))


def write(config, client, data, *, force=False, resume=None):
    said = []
    caller = RunCaller(client=client, data=data)
    write_dataset(caller, config, resume or ResumePoint(), force=force, note=said.append)
    return open_table(config.data.url), said[-1]


def tables():
    return [pa.Table.from_pylist(ROWS[:7]), pa.Table.from_pylist(ROWS[7:])]


def frame_of(rows, partitions=3, **categories):
    """Return rows as a dask.dataframe with an index of its own."""
    from dask.dataframe import from_pandas  # here: no other test needs pandas
    from pandas import DataFrame

    index = [f"row {number:02}" for number in range(len(rows))]
    return from_pandas(DataFrame(rows, index=index).astype(categories), npartitions=partitions)


FORMS = {
    "a dataframe": lambda client: frame_of(ROWS),
    "a dataframe with a category": lambda client: frame_of(ROWS, answer="category"),
    "a bag": lambda client: dask.bag.from_sequence(ROWS, npartitions=3),
    "delayed tables": lambda client: [delayed(table) for table in tables()],
    "futures": lambda client: client.scatter(tables()),
    "one delayed list": lambda client: delayed(list)(ROWS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_collection_is_the_same_rows_in_their_order(form, client, config):
    table, _ = write(config, client, FORMS[form](client))
    assert table.to_table().to_pylist() == ROWS


def test_the_same_collection_is_not_computed_again(client, config):
    table, _ = write(config, client, FORMS["a bag"](client))
    again, said = write(config, client, FORMS["a bag"](client))
    assert again.digest == table.digest
    assert "has this collection already" in said
    parts = [pa.Table.from_pylist(part) for part in (ROWS[:7], ROWS[7:14], ROWS[14:])]
    assert table.to_table().equals(pa.concat_tables(parts))
    others, said = write(config, client, [delayed(table, pure=False) for table in parts])
    assert others.digest == table.digest, "equal rows are the table that is there"
    assert "has these rows already" in said
    there = list(Path(config.data.url, "data").iterdir())
    assert len(there) == len(table.parts), "what is not used goes"


def test_the_same_dataframe_is_not_computed_again_and_one_with_other_rows_is_refused(
    client, config
):
    table, _ = write(config, client, frame_of(ROWS))
    again, said = write(config, client, frame_of(ROWS))
    assert again.digest == table.digest
    assert "has this collection already" in said
    with pytest.raises(ConfigError, match="has the rows of another collection"):
        write(config, client, frame_of(ROWS[::-1]), resume=ResumePoint(exists=True))


def test_chat_messages_in_a_dataframe_need_the_setting_that_the_error_names(client, config):
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    with pytest.raises(DataError, match=r"dataframe\.convert-string"):
        write(config, client, frame_of(chats))
    with dask.config.set({"dataframe.convert-string": False}):
        table, _ = write(config, client, frame_of(chats))
    assert table.to_table().to_pylist() == chats


def test_other_rows_are_refused_unless_they_are_asked_for(client, config):
    first, _ = write(config, client, dask.bag.from_sequence(ROWS, npartitions=2))
    other = dask.bag.from_sequence(ROWS[::-1], npartitions=2)
    begun = ResumePoint(exists=True)
    digest = first.properties[CONTENT][:16]
    with pytest.raises(
        ConfigError, match=rf"digest is {digest}, and that of data= is (?!{digest})"
    ):
        write(config, client, other, resume=begun)
    assert open_table(config.data.url).digest == first.digest
    second, _ = write(config, client, other, resume=begun, force=True)
    assert second.to_table().to_pylist() == ROWS[::-1]
    assert open_table(config.data.url, version=1).to_table().to_pylist() == ROWS
    third, _ = write(
        config, client, dask.bag.from_sequence(ROWS, npartitions=2), resume=ResumePoint(fresh=True)
    )
    assert DataVersion.of(third) == DataVersion.of(first), "the same rows are the same data"
    assert third.version == 3


def refused(config):
    data = config.data
    yield config, ROWS, {"client": None}, "client= is not given"
    what = "expected a dask.dataframe, a bag of dicts"
    yield config, ROWS, {}, f"is a list with an item of type dict: {what}"
    yield config, [], {}, f"is an empty list: {what}"
    yield config, pa.Table.from_pylist(ROWS), {}, f"is of type Table: {what}.*delayed"
    sources = replace(data, url=None, sources={"a": DataSource(url="x")})
    yield replace(config, data=sources), None, {}, "data.sources names several"
    prepared = replace(data, prepare="m:f")
    yield replace(config, data=prepared), None, {}, "set data.prepare=null"


def divides_by_zero():
    return 1 / 0


def test_a_future_that_is_gone_is_said_to_be(client, config):
    cancelled = client.submit(list, ROWS, pure=False)
    cancelled.result()
    cancelled.cancel()
    with pytest.raises(
        DataError, match=r"a partition is not there any more: its future.*cancelled"
    ):
        write(config, client, [cancelled])


def test_what_cannot_be_a_runs_dataset_is_refused_by_name(client, config):
    bag = FORMS["a bag"](client)
    for changed, data, how, said in refused(config):
        with pytest.raises(ConfigError, match=said):
            write(changed, how.get("client", client), bag if data is None else data)
    create_table(config.data.url, [pa.table({"prompt": ["mine"]})])
    with pytest.raises(ConfigError, match="where another dataset is already"):
        write(config, client, bag)
    config = replace(config, data=replace(config.data, url=f"{config.data.url}-2"))
    with pytest.raises(DataError, match=r"ZeroDivisionError: .* \(.*test_collection.py:\d+\)"):
        write(config, client, [delayed(divides_by_zero)()])
    with pytest.raises(DataError, match="has no rows"):
        write(config, client, [delayed(pa.table({"prompt": pa.array([], pa.string())}))])


def made_slowly(rows, kill_in):
    """Return rows as a table; the worker dies where the file is not there yet."""
    if not kill_in.exists():
        kill_in.touch()
        assert get_worker().nanny is not None
        os.kill(os.getpid(), signal.SIGKILL)
    return pa.Table.from_pylist(rows)


def test_a_worker_that_is_killed_meanwhile_changes_nothing(config, tmp_path):
    parts = [ROWS[start : start + 5] for start in range(0, 20, 5)]
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 3}),
        local_cluster(2) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        marks = [tmp_path / f"mark-{number}" for number in range(4)]
        for number in (0, 1, 3):
            marks[number].touch()
        jobs = [delayed(made_slowly)(part, mark) for part, mark in zip(parts, marks, strict=True)]
        table, _ = write(config, client, jobs)
        assert marks[2].exists()
    undisturbed = [pa.Table.from_pylist(part) for part in parts]
    assert table.to_table().to_pylist() == ROWS
    other = replace(config, data=replace(config.data, url=str(tmp_path / "other")))
    with local_cluster(1) as cluster, Client(cluster, set_as_default=False) as client:
        expected, _ = write(other, client, [delayed(one) for one in undisturbed])
    assert content_digest(table.schema, table.parts) == expected.properties[CONTENT]


def test_partitions_whose_messages_have_other_keys_are_one_table(client, config):
    first = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "tags": []}
    second = {
        "prompt": [{"role": "user", "content": "x", "name": "a"}],
        "answer": "2",
        "tags": ["b"],
    }
    bag = dask.bag.from_sequence([first, second, first], npartitions=3)
    table, said = write(config, client, bag)
    messages = [dict(row["prompt"][0]) for row in table.to_table().to_pylist()]
    assert [message["name"] for message in messages] == [None, "a", None]
    assert [row["tags"] for row in table.to_table().to_pylist()] == [[], ["b"], []]
    stored = [path.name for path in Path(config.data.url).rglob("*.parquet")]
    assert len(stored) == len(table.parts) == 3, "what was written in other types is removed"
    again, said = write(config, client, bag)
    assert "has this collection already" in said
    assert again.digest == table.digest
