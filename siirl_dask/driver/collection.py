"""A Dask collection as a run's dataset: the workers that hold its partitions write them, and they
become one committed table at ``data.url``.

No row passes through this process or the scheduler. From then on the table is the dataset, as any
other: its order does not depend on the workers, a resume finds the same rows, and nothing is held
in memory for it. Which rows these are is part of the run's identity: see
``tables/content.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from dask.delayed import Delayed, delayed
from dask.tokenize import tokenize
from distributed import Client, Future
from siirl_storage import (
    Part,
    Snapshot,
    StorageError,
    TableNotFound,
    absolute,
    commit,
    join,
    open_fs,
    open_table,
    remove_file,
)

from siirl_dask.config import Config
from siirl_dask.dask_internals import FutureCancelledError
from siirl_dask.datasets import destination
from siirl_dask.datasets.partitions import (
    StagedPartition,
    common_schema,
    restage_partition,
    stage_partition,
)
from siirl_dask.driver.caller import RunCaller, scheduler_address
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.driver.recovery.resume import ResumePoint
from siirl_dask.errors import ConfigError, DataError, UserError, counted
from siirl_dask.tables.content import CONTENT, TOKEN, content_digest
from siirl_dask.wording import exception_text_with_place

_RETRIES = 2  # of a partition whose worker was lost, beyond those that Dask makes itself
_SHOWN = 16  # hexadecimal digits of a digest in a message


@dataclass(frozen=True, slots=True)
class Collection:
    """The partitions of a Dask collection, in their order."""

    partitions: Sequence[Any]
    """A Delayed or a Future each."""
    token: str
    """Dask's token: equal for collections of equal graphs, where Dask can tell."""

    @staticmethod
    def of(data: object) -> Collection:
        """Take a collection apart. ConfigError for anything that is none of tables."""
        partitions = data
        if isinstance(data, Delayed | Future):
            partitions = [data]
        elif hasattr(data, "to_delayed"):
            partitions = data.to_delayed()
        if (
            not isinstance(partitions, list | tuple)
            or not partitions
            or not all(isinstance(one, Delayed | Future) for one in partitions)
        ):
            raise ConfigError(
                f"data= is {_what_it_is(data)}: expected a dask.dataframe, a bag of dicts, or a list "
                "of delayed values or futures of Arrow tables, each at least of one partition; "
                "dask.dataframe.from_pandas(frame, npartitions=1), dask.bag.from_sequence(rows) and "
                "[dask.delayed(table)] make them, and data.url names a dataset in files"
            )
        return Collection(list(partitions), tokenize(list(partitions)))

    def stage(
        self,
        client: Client,
        url: str,
        prompt: str,
        check: Callable[[], None],
    ) -> list[StagedPartition]:
        """Have each partition written below ``url`` by a worker that holds it. ``check`` is called
        meanwhile, and may raise.

        DataError for a partition that cannot be computed.
        """
        is_own = {one.client is client for one in self.partitions if isinstance(one, Future)}
        if False in is_own:
            raise ConfigError(
                "data= has futures of another client than client=: give the client that made them"
            )

        try:
            return _gathered(client, lambda: self._submitted(client, url, prompt), url, check)
        except FutureCancelledError as error:
            raise DataError(
                "data: a partition is not there any more: its future, or one that it is made of, "
                f"was cancelled or released, or was scattered to a worker that is lost: {error}"
            ) from error
        except Exception as error:  # whatever the collection's own functions raise
            raise DataError(
                "data: a partition cannot be computed or written: it "
                f"{exception_text_with_place(error)}"
            ) from error

    def _submitted(self, client: Client, url: str, prompt: str) -> list[Future[StagedPartition]]:
        """Return a future for each partition, in their order. Delayed partitions are computed by
        one call, since the graph of each contains all of them.
        """
        stage = delayed(stage_partition, pure=False)
        jobs = [stage(one, url, prompt) for one in self.partitions if isinstance(one, Delayed)]
        computed = iter(client.compute(jobs, retries=_RETRIES))
        futures = []
        for one in self.partitions:
            if isinstance(one, Future):
                future = client.submit(
                    stage_partition, one, url, prompt, pure=False, retries=_RETRIES
                )
            else:
                future = next(computed)
            futures.append(future)
        return futures


def _gathered(
    client: Client,
    submit: Callable[[], list[Future[StagedPartition]]],
    url: str,
    check: Callable[[], None],
) -> list[StagedPartition]:
    """Return what the futures that ``submit`` makes come to; parts are removed where one fails."""

    async def gather() -> list[StagedPartition]:
        futures = submit()
        try:
            staged: list[StagedPartition] = await client.gather(futures, asynchronous=True)
        except Exception:
            written = [future for future in futures if future.status == "finished"]
            orphans = await client.gather(written, errors="skip", asynchronous=True)
            await client.cancel(futures, asynchronous=True)
            _remove(url, [one.part for one in orphans if one.part is not None])
            raise
        return staged

    return complete(client, gather, check)


def _in_types_of(
    schema: pa.Schema,
    staged: Sequence[StagedPartition],
    client: Client,
    url: str,
    check: Callable[[], None],
) -> list[Part]:
    """Return the parts of all partitions. Those whose types are not those of ``schema`` are written
    again by workers, which read what is stored: no partition is computed twice.

    DataError for a part that cannot be read or written; all parts of ``staged`` are there then.
    """
    parts = {number: one.part for number, one in enumerate(staged) if one.part is not None}
    others = []
    for number in parts:
        if not staged[number].has_types_of(schema):
            others.append(number)
    if not others:
        return list(parts.values())
    kinds = schema.serialize().to_pybytes()

    def submit() -> list[Future[StagedPartition]]:
        return [
            client.submit(
                restage_partition, staged[number], url, kinds, pure=False, retries=_RETRIES
            )
            for number in others
        ]

    try:
        again = _gathered(client, submit, url, check)
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            "data: a partition cannot be written again in the types of the others: it "
            f"{exception_text_with_place(error)}"
        ) from error
    _remove(url, [parts[number] for number in others])
    for number, one in zip(others, again, strict=True):
        assert one.part is not None
        parts[number] = one.part
    return list(parts.values())


def write_dataset(
    caller: RunCaller,
    config: Config,
    resume: ResumePoint,
    *,
    force: bool,
    note: Callable[[str], None],
) -> None:
    """Write the caller's collection as the table at ``data.url``, unless that is there already.

    A table of the same collection is taken as it is, and nothing is computed; a collection that
    Dask cannot tell apart is computed, and compared. ConfigError where other rows are there:
    ``force`` and ``fresh`` write a new version of the table, and so does a run that has not begun
    and has the table in its own folder. DataError for rows that cannot be a dataset.
    """
    client = caller.client
    url = config.data.url
    _check(config, client)
    assert client is not None
    assert url is not None
    scheduler_address(client)
    collection = Collection.of(caller.data)
    there = _table_at(url)
    if there is not None and not resume.fresh and _is_of(there, collection.token):
        note(f"data       {url} has this collection already: {_described(there)}")
        return
    count = counted(len(collection.partitions), "partition")
    note(f"data       writing {count} of the collection to {url}")
    staged = collection.stage(client, url, config.data.prompt, caller.stop.check)
    parts = [one.part for one in staged if one.part is not None]
    may_replace = force
    if resume.fresh or (not resume.exists and _is_in_run(url, config)):
        may_replace = True
    try:
        schema = _schema_of(staged)
        parts = _in_types_of(schema, staged, client, url, caller.stop.check)
        content = content_digest(schema, parts)
        has_same_rows = _compare(url, there, content, may_replace=may_replace)
    except UserError:
        _remove(url, parts)
        raise
    if there is not None and has_same_rows:
        _remove(url, parts)
        note(f"data       {url} has these rows already: {_described(there)}")
        return
    properties = {CONTENT: content, TOKEN: collection.token}
    with _committing(url):
        table = commit(
            url,
            parts,
            schema=schema,
            properties=properties,
            new=there is None,
            replace=there is not None,
        )
    note(f"data       {_described(table)} in {url}")


def _what_it_is(data: object) -> str:
    """Return the type of what is no collection, and that of its first item."""
    kind = type(data).__qualname__
    if not isinstance(data, list | tuple):
        return f"of type {kind}"
    if not data:
        return f"an empty {kind}"
    others = [one for one in data if not isinstance(one, Delayed | Future)]
    return f"a {kind} with an item of type {type(others[0]).__qualname__}"


def _check(config: Config, client: Client | None) -> None:
    if client is None:
        raise ConfigError(
            "data= is a Dask collection, and client= is not given: give the client of the cluster "
            "that computes it"
        )
    if config.data.sources:
        raise ConfigError(
            "data= is one dataset, and data.sources names several: leave one of them out"
        )
    if config.data.prepare is not None:
        raise ConfigError(
            f"data= is the dataset, and data.prepare={config.data.prepare!r} makes one: set "
            "data.prepare=null"
        )


def _table_at(url: str) -> Snapshot | None:
    """Return the table that an earlier start wrote of a collection; None where nothing is there.
    ConfigError for any other dataset.
    """
    try:
        there = open_table(url)
    except TableNotFound:
        return None
    except (StorageError, OSError) as error:
        raise DataError(f"data.url={url!r}: {error}") from error
    if CONTENT not in there.properties:
        raise ConfigError(
            f"data= is to be written at data.url={url!r}, where another dataset is already: name "
            "another place, or leave data= out to train on what is there"
        )
    return there


def _schema_of(staged: Sequence[StagedPartition]) -> pa.Schema:
    """Return the columns of all partitions. DataError where they are no dataset."""
    problem = next((one.problem for one in staged if one.problem), "")
    if problem:
        raise DataError(f"data: {problem}")
    if not any(one.part for one in staged):
        raise DataError("data: the collection has no rows: expected at least one")
    return common_schema(staged)


def _compare(url: str, there: Snapshot | None, content: str, *, may_replace: bool) -> bool:
    """Return whether the table that is there has the rows of digest ``content``. ConfigError if it
    has others, and they may not be replaced.
    """
    if there is None:
        return False
    found = content_digest(there.schema, there.parts)
    if found == content:
        return True
    if may_replace:
        return False
    raise ConfigError(
        f"data.url={url!r} has the rows of another collection: their digest is {found[:_SHOWN]}, "
        f"and that of data= is {content[:_SHOWN]}. Give the collection that it was made of, "
        "another data.url, force=True to go on with the new rows, or fresh=True, which begins "
        "again and removes the run's files"
    )


@contextmanager
def _committing(url: str) -> Iterator[None]:
    with destination(url):
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(
                f"data.url={url!r}: a part that a worker has written is not there: {error}; "
                "expected a folder that this machine and all workers share, or the URL of a store"
            ) from error


def _remove(url: str, parts: Sequence[Part]) -> None:
    """Remove parts that were written and are in no version of the table."""
    for part in parts:
        fs, path = open_fs(join(url, part.path))
        if fs.exists(path):
            remove_file(fs, path)


def _is_of(table: Snapshot, token: str) -> bool:
    """Return whether the table was written of the collection, and has the rows of then: none were
    appended.
    """
    if table.properties.get(TOKEN) != token:
        return False
    return table.properties[CONTENT] == content_digest(table.schema, table.parts)


def _is_in_run(url: str, config: Config) -> bool:
    return url.startswith(join(absolute(config.run.url), ""))


def _described(table: Snapshot) -> str:
    digest = content_digest(table.schema, table.parts)[:_SHOWN]
    rows = counted(table.num_rows, "row")
    return f"{rows} in {counted(len(table.parts), 'part')}, digest {digest}"
