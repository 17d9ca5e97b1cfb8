"""The samples that a run saved, as one table: DuckDB reads the Parquet parts in place, and of them
what is asked for.

Only whole steps count: those whose parts are committed, see tables.py. The step under way is not
one of them, nor one that a killed run began. questions.py has questions that are often asked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from fsspec import AbstractFileSystem
from siirl_storage import StorageError, by_folder, join, list_files, newest_parts, open_fs
from siirl_storage.committed import whole_folders
from siirl_storage.exact_names import confine, make_known, sql_list
from siirl_storage.files import at
from siirl_storage.formats import read_footer

from siirl_dask.errors import DataError, SiirlError, counted, did_you_mean
from siirl_dask.runs.absent import hint_if_absent
from siirl_dask.schema import missing_step, path_steps, type_at
from siirl_dask.tables import step_name, step_of

if TYPE_CHECKING:
    import duckdb

TABLE = "rollouts"
ATTEMPT = "attempt"
"""int64. Number of the start that wrote the row, from its part's name; null where the name does
not tell."""
_NAME = re.compile(r"\w[\w-]*")
# a column of this name lets DuckDB leave out files before it opens them; the virtual one does not
_PATH = "__path__"
_FOLDER = r"/step=(\d+)/[^/]*$"
_LITTLE = "SET threads = 1; SET memory_limit = '1GB'"
"""Settings for somebody else's process, such as a scheduler's."""
_WRITER = r"part-(\d{4,})-\d{5,}\.\w+$"
_READERS = 16  # threads that read footers
_PAUSE = 0.1  # seconds between two requests to end a query
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SavedSteps:
    """The saved steps of a run, each with the paths of its parts below the table."""

    whole: Mapping[int, Sequence[str]]
    incomplete: Mapping[int, Sequence[str]]
    """Steps under way or never finished; the parts that are there are of one start."""


def saved_steps(fs: AbstractFileSystem, root: str) -> SavedSteps:
    """Return the steps of the table at ``root``. DataError for a damaged record."""
    listed = list_files(fs, root)
    files = {
        path: size for path, size in listed.items() if step_of(path.rpartition("/")[0]) is not None
    }
    try:
        complete = whole_folders(fs, root, files)
    except StorageError as error:
        raise DataError(str(error)) from error
    whole = {}
    incomplete = {}
    for folder, names in by_folder(files).items():
        step = step_of(folder)
        assert step is not None
        if folder in complete:
            whole[step] = complete[folder]
        elif parts := newest_parts(names) or sorted(
            name for name in names if name.endswith(".parquet")
        ):
            incomplete[step] = [f"{folder}/{name}" for name in parts]
    return SavedSteps(dict(sorted(whole.items())), dict(sorted(incomplete.items())))


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The samples of a run, open for questions; ``open_rollouts`` makes it."""

    name: str
    """Name of the table, under which SQL finds it."""
    fs: AbstractFileSystem
    files: Mapping[int, Sequence[str]]
    """Paths of the parts of each step that counts."""
    schema: pa.Schema
    remark: str
    """A sentence about steps that are not whole, which may be empty."""
    is_mixed: bool
    """Whether the parts have several sets of columns."""
    _connection: duckdb.DuckDBPyConnection

    @property
    def view(self) -> str:
        """The table's name, quoted for SQL."""
        return quoted(self.name)

    def sql(self, sql: str, parameters: Sequence[Any] = ()) -> duckdb.DuckDBPyRelation:
        """Return the answer to one SELECT, computed when it is read. DataError for any other or
        wrong SQL.
        """
        import duckdb

        with as_data_error():
            statements = self._connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise DataError(
                    "expected one SELECT, and nothing that writes or changes settings, not "
                    f"{sql!r:.100}"
                )
            return self._connection.sql(sql, params=list(parameters) or None)

    def table(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Return the answer to one SELECT. DataError for any other or wrong SQL, and for damaged
        parts.
        """
        with as_data_error():
            return self.sql(sql, parameters).to_arrow_table()

    def interruptibly(self, ask: Callable[[], _T]) -> _T:
        """Return the result of ``ask``, called in a thread, so that Ctrl-C ends a query that takes
        long: DuckDB itself does not look for it.
        """
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            try:
                return asked.result()
            except KeyboardInterrupt:
                while not asked.done():
                    self._connection.interrupt()
                    wait([asked], timeout=_PAUSE)
                raise

    def of_steps(self, steps: Sequence[int]) -> str:
        """Return a table expression for SQL that has the rows of these steps alone, and reads no
        others where all parts have the same columns.
        """
        if self.is_mixed:
            numbers = ", ".join(map(str, steps))
            return f"(SELECT * FROM {self.view} WHERE step IN ({numbers}))"
        return _source(self.fs, [path for step in steps for path in self.files[step]])

    def column(self, path: str) -> str:
        """Return SQL for the column at ``path``, in which a dot goes into a struct. DataError if
        there is none.
        """
        missing = missing_step(self.schema, path)
        if missing is not None:
            name, known = missing
            raise DataError(
                f"the table {self.name!r} has no column {path!r}: expected one of "
                f"{', '.join(known)}{did_you_mean(name, known)}"
            )
        kind = type_at(self.schema, path)
        names = path_steps(path, self.schema.names)
        if pa.types.is_nested(kind):
            raise DataError(
                f"the column {path!r} holds {kind}: expected one of numbers, texts or truth values"
            )
        return ".".join(quoted(name) for name in names)


def check_name(table: str) -> None:
    """Raise DataError for what can be no table of a run, such as a path."""
    if not _NAME.fullmatch(table):
        raise DataError(f"{table!r} is no table of a run: expected rollouts, validation or test")


@contextmanager
def open_rollouts(
    url: str,
    *,
    table: str = TABLE,
    steps: range | None = None,
    incomplete: bool = False,
) -> Iterator[Rollouts]:
    """Open the samples of the run at ``url``: those of ``table``, of ``steps`` alone if given.

    With ``incomplete`` the rows of steps count that are not whole. DataError if there is no such
    table or step.
    """
    check_name(table)
    try:
        fs, root = open_fs(join(url, table))
        saved = saved_steps(fs, root)
    except StorageError as error:
        raise DataError(str(error)) from error
    except SiirlError:
        raise
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise DataError(f"{url!r} cannot be read: {type(error).__name__}: {error}") from error
    taken = dict(sorted({**saved.whole, **(saved.incomplete if incomplete else {})}.items()))
    remark = _remark(saved, incomplete)
    if not taken:
        what = "rollouts"
        if table != TABLE:
            what = f"table {table!r}"
        expected = "expected the folder of a run that has finished a step"
        hint = f"; {remark}" if remark else hint_if_absent(url)
        raise DataError(f"{url!r} holds no {what}: {expected}{hint}")
    chosen = {step: parts for step, parts in taken.items() if steps is None or step in steps}
    if steps is not None and not chosen:
        there = f"{counted(len(taken), 'step')}, {min(taken)} to {max(taken)}"
        raise DataError(f"{url!r} has saved no {in_words(steps)} of {table!r}: it has {there}")
    files = {step: [at(root, part) for part in parts] for step, parts in chosen.items()}
    with _opened(fs, root, table, files, remark) as rollouts:
        yield rollouts


@contextmanager
def open_newest(
    url: str,
    steps: Sequence[int],
    *,
    table: str = TABLE,
    most_bytes: int = 2**26,
) -> Iterator[Rollouts | None]:
    """Open the samples of those of ``steps`` that are whole; None if none is. No other step's
    folder is looked into.

    Of more than ``most_bytes`` of files the newest steps' first parts count, one at least.
    DataError for a store that cannot be read, and for a damaged record.
    """
    try:
        fs, root = open_fs(join(url, table))
        sizes = {}
        for step in steps:
            folder = step_name(step)
            for name, size in list_files(fs, at(root, folder)).items():
                sizes[f"{folder}/{name}"] = size
        whole = whole_folders(fs, root, sizes)
    except StorageError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise DataError(f"{url!r} cannot be read: {type(error).__name__}: {error}") from error
    files: dict[int, list[str]] = {}
    room = most_bytes
    for step in sorted(steps, reverse=True):
        for part in whole.get(step_name(step), ()):
            room -= sizes[part]
            if room >= 0 or not files:
                files.setdefault(step, []).append(at(root, part))
    if not files:
        yield None
        return
    with _opened(fs, root, table, dict(sorted(files.items())), "", settings=_LITTLE) as rollouts:
        yield rollouts


@contextmanager
def _opened(
    fs: AbstractFileSystem,
    root: str,
    table: str,
    files: Mapping[int, Sequence[str]],
    remark: str,
    settings: str = "",
) -> Iterator[Rollouts]:
    """Open these parts of the table at ``root`` as a view of its name. Queries reach nothing else,
    whoever writes them.

    ``settings`` are statements before.
    """
    import duckdb  # here, so that reading a config does not load it

    with duckdb.connect() as connection:
        make_known(connection, fs)
        if settings or not sys.stdout.isatty():
            # it is drawn on stdout; in a notebook without ipywidgets it cannot be changed, nor drawn
            with suppress(duckdb.InvalidInputException):
                connection.execute("SET enable_progress_bar = false")
        if settings:
            connection.execute(settings)
        confine(connection, fs, root)
        with as_data_error():
            everything = [path for paths in files.values() for path in paths]
            is_mixed = _have_several_schemas(fs, everything)
            source = _source(fs, everything, union=is_mixed)
            connection.execute(f"CREATE VIEW {quoted(table)} AS SELECT * FROM {source}")
            schema = (
                connection.sql(f"SELECT * FROM {quoted(table)} LIMIT 0").to_arrow_table().schema
            )
        yield Rollouts(
            table,
            fs,
            files=files,
            schema=schema,
            remark=remark,
            is_mixed=is_mixed,
            _connection=connection,
        )


def _have_several_schemas(fs: AbstractFileSystem, paths: Sequence[str]) -> bool:
    """Return whether the parts of several starts have other columns: a run that is resumed with
    another DAG saves others. All parts of one start have the same.
    """
    of_starts: dict[str | None, str] = {}
    for path in paths:
        named = re.search(_WRITER, path)
        of_starts.setdefault(None if named is None else named[1], path)
    if len(of_starts) == 1:
        return False
    with ThreadPoolExecutor(_READERS) as readers:
        try:
            footers = list(readers.map(lambda path: read_footer(fs, path), of_starts.values()))
        except (StorageError, FileNotFoundError):
            return True  # a query says which part is damaged
    return len({footer.schema.remove_metadata() for footer in footers}) > 1


def in_words(steps: range) -> str:
    """Return ``step 7``, ``step from 7 to 9`` or, where there is no end, ``step from 7 on``."""
    if steps.stop - steps.start == 1:
        return f"step {steps.start}"
    return (
        f"step from {steps.start} {'on' if steps.stop == sys.maxsize else f'to {steps.stop - 1}'}"
    )


def query(url: str, sql: str, *, incomplete: bool = False) -> pa.Table:
    """Return the answer to ``sql`` over the table ``rollouts`` of the run at ``url``: a row per
    sample, with ``step``.

    With ``incomplete`` the rows of steps count that are not whole. DataError if there is no such
    table or the SQL is wrong.
    """
    with open_rollouts(url, incomplete=incomplete) as rollouts:
        return rollouts.table(sql)


@contextmanager
def as_data_error() -> Iterator[None]:
    """Raise DataError for DuckDB's errors: wrong SQL, a damaged part."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise DataError(f"the query failed: {error}") from error


def _source(fs: AbstractFileSystem, paths: Sequence[str], *, union: bool = False) -> str:
    """Return SQL for the rows of these files, with the columns ``step`` and ``attempt`` from their
    own names.

    With ``union`` the columns of all files, which DuckDB opens for that; else those of the first.

    DuckDB's own columns from ``key=value`` would be those of all folders above the run as well.
    """
    return (
        f"(SELECT COLUMNS(lambda name: lower(name) NOT IN ('step', '{_PATH}')), "
        f"CAST({_step_in_path(paths)} AS BIGINT) AS step, "
        f"TRY_CAST(regexp_extract({_PATH}, '{_WRITER}', 1) AS BIGINT) AS {ATTEMPT} "
        f"FROM read_parquet({sql_list(fs, paths)}, hive_partitioning=false, "
        f"union_by_name={str(union).lower()}, filename='{_PATH}'))"
    )


def _step_in_path(paths: Sequence[str]) -> str:
    """Return SQL for the digits of a path's step.

    They are a slice where all steps and parts have names of one length, as nearly always: a
    question about one step looks for them in every path, and slices take half as long as
    expressions.
    """
    lengths = set()
    for path in paths:
        folder_and_part = len(path) - path.rindex("/step=")
        lengths.add((folder_and_part, len(path) - path.rindex("/")))
    if len(lengths) != 1:
        return f"regexp_extract({_PATH}, '{_FOLDER}', 1)"
    [(folder_and_part, part)] = lengths
    return f"{_PATH}[-{folder_and_part - len('/step=')}:-{part + 1}]"


def quoted(name: str) -> str:
    """Return a name, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _remark(steps: SavedSteps, incomplete: bool) -> str:
    if not steps.incomplete:
        return ""
    parts = ", ".join(
        f"{step} ({counted(len(parts), 'part')})" for step, parts in steps.incomplete.items()
    )
    return (
        f"steps that are not whole, and {'counted' if incomplete else 'left out (--incomplete)'}: "
        f"{parts}"
    )
