"""Finds the files of a run that neither a resume nor a replay needs, and deletes them.

What stays: every complete checkpoint, the rows of each step after the oldest of them (a resume may
have to go back to it), and all that records of tables list, unless their owner wants fewer steps
kept. A stage stays until a table further on has its rows, or the oldest checkpoint is of its step
or a later one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from fsspec import AbstractFileSystem
from siirl_storage import (
    StorageError,
    by_folder,
    join,
    list_files,
    newest_parts,
    open_fs,
    remove_file,
)
from siirl_storage.committed import is_numbered, record_name, recorded_parts
from siirl_storage.files import at

from siirl_dask.errors import DataError
from siirl_dask.planner import STAGES, TRACE
from siirl_dask.runs.attempt import is_held
from siirl_dask.runs.checkpoints import FOLDER as CHECKPOINTS
from siirl_dask.runs.checkpoints import committed, kept_folders
from siirl_dask.runs.identity_file import note_retention
from siirl_dask.runs.stages import spent_by
from siirl_dask.runs.tables import REPLAY
from siirl_dask.tables import step_name, step_of

logger = logging.getLogger("siirl_dask.runs")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]+\.tmp|\.writable-[0-9a-f]+", re.ASCII)

MODEL = ".model-"
"""Begin of the name of a folder that holds a checkpoint's weights while an evaluation goes on."""
OWNER = ".owner"
"""End of the name of the folder beside it in which the evaluation gives signs of life."""
_IN_MODEL = re.compile(
    rf"((?:.+/)?{re.escape(MODEL)}[0-9a-f]+)(?:{re.escape(OWNER)})?/.+", re.ASCII
)


class Reason(StrEnum):
    """Why a file is not needed."""

    UNFINISHED = "written by a start that ended before it had committed them"
    SUPERSEDED = "superseded by a later start"
    SPENT = "stages whose rows a later table or a checkpoint makes unnecessary"
    OLD = "rows of older steps (run.keep_stages, --keep-stages)"
    REPLAYED = "tables of replays (--replays)"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that is not needed."""

    path: str
    """Path below the run's folder."""
    nbytes: int
    reason: Reason


def find_leftovers(
    url: str,
    *,
    keep_stages: int | None = None,
    replays: bool = False,
    note: Callable[[str], None] = logger.info,
) -> list[Leftover]:
    """Return the files of the run at ``url`` that are not needed, those first that may be deleted
    first.

    ``keep_stages`` is the number of newest steps whose rows stay; None: all. Rows that a resume may
    need stay in any case. With ``replays`` the tables of replays are not needed either. The model
    of an evaluation on another host is watched for a sign of life, and ``note`` is called with a
    sentence about the wait. DataError for a record that is damaged.
    """
    fs, root = open_fs(url)
    files = list_files(fs, root)
    oldest = min(committed(url), default=0)
    try:
        found = [
            *_temporary(url, files, note),
            *_of_checkpoints(url, files),
            *_of_tables(fs, root, files, replays),
            *_of_spent_stages(fs, root, files, oldest),
            *_of_old_steps(files, oldest, keep_stages),
        ]
    except StorageError as error:
        raise DataError(f"{error}: `siirl-dask check` says what else is damaged") from error
    return list({leftover.path: leftover for leftover in reversed(found)}.values())[::-1]


def remove_leftovers(url: str, leftovers: Iterable[Leftover]) -> None:
    """Delete the files. Records of tables go before the parts that they list, and older steps
    are remembered.
    """
    fs, root = open_fs(url)
    leftovers = list(leftovers)
    note_retention(url, _removed_steps(leftovers))
    for leftover in sorted(leftovers, key=lambda one: not one.path.endswith(".json")):
        remove_file(fs, at(root, leftover.path))


def remove_old_stages(url: str, keep: int | None) -> None:
    """Delete the rows of all but the ``keep`` newest steps, and all stages, as far as no resume may
    need them.

    ``keep=None`` deletes stages alone.
    """
    fs, root = open_fs(url)
    oldest = min(committed(url), default=0)
    stages = {
        f"{STAGES}/{path}": nbytes for path, nbytes in list_files(fs, at(root, STAGES)).items()
    }
    remove_leftovers(url, _of_old_stages(stages, oldest))
    if keep is not None:
        remove_leftovers(url, _of_old_steps(list_files(fs, root), oldest, keep))


def _temporary(
    url: str, files: Mapping[str, int], note: Callable[[str], None]
) -> Iterator[Leftover]:
    """Yield temporary files, and the models of evaluations that are over: one under way reads
    its own.
    """
    models = {matched[1] for matched in map(_IN_MODEL.fullmatch, files) if matched}
    in_use = {model for model in models if is_held(join(url, f"{model}{OWNER}"), note)}
    for path, nbytes in files.items():
        matched = _IN_MODEL.fullmatch(path)
        if matched and matched[1] in in_use:
            continue
        if matched or _TEMPORARY.fullmatch(path.rpartition("/")[2]):
            yield Leftover(path, nbytes, Reason.UNFINISHED)


def _of_checkpoints(url: str, files: Mapping[str, int]) -> Iterator[Leftover]:
    """Yield the files of checkpoint folders that are not complete, or that a later start's
    checkpoint replaces.
    """
    kept = kept_folders(url)
    for path, nbytes in files.items():
        folder, _, rest = path.partition("/")
        if folder == CHECKPOINTS and rest.partition("/")[0] not in kept:
            yield Leftover(path, nbytes, Reason.UNFINISHED)


def _of_tables(
    fs: AbstractFileSystem,
    root: str,
    files: Mapping[str, int],
    replays: bool,
) -> Iterator[Leftover]:
    for folder, names in by_folder(files).items():
        table, step = _table_and_step(folder)
        if step is None:
            continue
        if REPLAY.fullmatch(table):
            replayed = names if replays else ()
            yield from _leftovers(folder, names, replayed, Reason.REPLAYED)
            continue
        if table == TRACE:
            counted = newest_parts(names)
            older = [name for name in names if is_numbered(name) and name not in counted]
            yield from _leftovers(folder, names, older, Reason.SUPERSEDED)
            continue
        parts = recorded_parts(fs, root, folder, names)
        listed = {part.path for part in parts or ()} | {record_name(names)}
        others = [name for name in names if is_numbered(name) and name not in listed]
        reason = Reason.UNFINISHED if parts is None else Reason.SUPERSEDED
        yield from _leftovers(folder, names, others, reason)


def _of_old_steps(files: Mapping[str, int], oldest: int, keep: int | None) -> Iterator[Leftover]:
    """Yield the files of steps before the ``keep`` newest of each table; those after step
    ``oldest`` stay.
    """
    steps: dict[str, list[int]] = {}
    folders = by_folder(files)
    for folder in folders:
        table, step = _table_and_step(folder)
        if step is not None and not REPLAY.fullmatch(table) and not _is_stage(table):
            steps.setdefault(table, []).append(step)
    if keep is None:
        return
    for table, own in steps.items():
        for step in sorted(own)[:-keep]:
            if step <= oldest:
                folder = f"{table}/{step_name(step)}"
                yield from _leftovers(folder, folders[folder], folders[folder], Reason.OLD)


def _of_spent_stages(
    fs: AbstractFileSystem,
    root: str,
    files: Mapping[str, int],
    oldest: int,
) -> Iterator[Leftover]:
    """Yield the files of stages of steps up to ``oldest``, and of those that the record of a
    later table names.
    """
    yield from _of_old_stages(files, oldest)
    folders = by_folder(files)
    steps = {
        step
        for table, step in map(_table_and_step, folders)
        if step is not None and _is_stage(table)
    }
    for folder, names in folders.items():
        _, step = _table_and_step(folder)
        if step is None or step not in steps:
            continue
        for table in filter(_is_stage, spent_by(fs, root, folder, names) or ()):
            stage = f"{table}/{step_name(step)}"
            yield from _leftovers(
                stage, folders.get(stage, {}), folders.get(stage, {}), Reason.SPENT
            )


def _of_old_stages(files: Mapping[str, int], oldest: int) -> Iterator[Leftover]:
    """Yield the files of stages of steps up to ``oldest``."""
    for folder, names in by_folder(files).items():
        table, step = _table_and_step(folder)
        if step is not None and step <= oldest and _is_stage(table):
            yield from _leftovers(folder, names, names, Reason.SPENT)


def _table_and_step(folder: str) -> tuple[str, int | None]:
    """Return table and step of a folder below the run's; the step is None unless rows of a step
    are in it.
    """
    table, _, name = folder.rpartition("/")
    return table, step_of(name) if table and ("/" not in table or _is_stage(table)) else None


def _removed_steps(leftovers: Iterable[Leftover]) -> dict[str, int]:
    """Return the last of the older steps among the files, by table: nobody misses their rows."""
    steps: dict[str, int] = {}
    for leftover in leftovers:
        table, step = _table_and_step(leftover.path.rpartition("/")[0])
        if step is not None and leftover.reason is Reason.OLD:
            steps[table] = max(step, steps.get(table, 0))
    return steps


def _is_stage(table: str) -> bool:
    return table.startswith(f"{STAGES}/")


def _leftovers(
    folder: str,
    names: Mapping[str, int],
    chosen: Collection[str] | Iterable[str],
    reason: Reason,
) -> Iterator[Leftover]:
    for name in chosen:
        yield Leftover(f"{folder}/{name}", names[name], reason)
