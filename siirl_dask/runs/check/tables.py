"""Checks the saved tables of a run: every part that a record lists, by its digest or page by
page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsspec import AbstractFileSystem
from siirl_storage import (
    CorruptPart,
    Part,
    StorageError,
    TooLarge,
    by_folder,
    digest_file,
    list_files,
    newest_parts,
    newest_record,
    parse_part_name,
    read_footer,
    read_rows,
)
from siirl_storage.committed import is_numbered, record_name
from siirl_storage.files import at
from siirl_storage.parts import complete_names

from siirl_dask.errors import counted
from siirl_dask.planner import STAGES, TRACE
from siirl_dask.runs.check.finding import PartState, RunFinding
from siirl_dask.runs.stages import SPENT, misplaced
from siirl_dask.tables import step_of

_READERS = 4
_ALWAYS_AGAIN = "test"  # a resume ends with a test of its own


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder of parts, such as that of a step."""

    path: str
    parts: tuple[Part, ...]
    """The parts that count."""
    others: int
    """Number of parts that no record lists."""
    committed: bool = True
    """False where no record says which parts count, nor their names."""
    frontier: bool = False
    """True if its record says that a step can go on from it."""


def check_tables(
    fs: AbstractFileSystem,
    root: str,
    files: Mapping[str, int],
    resumed: int,
    due: Collection[str],
    read: Callable[[int], None],
) -> list[RunFinding]:
    """Return what is found of the tables below ``root``: one finding for each whole table, one for
    each other step.

    ``files`` are the sizes of all files by path; a resume goes on after step ``resumed``. ``due``
    are the folders that ought to be there. ``read`` is told the bytes of each file that was read.
    """
    findings: list[RunFinding] = []
    damaged: list[tuple[str, str]] = []
    tables: dict[str, list[_Folder]] = {}
    present: set[str] = set()
    for path, names in sorted(by_folder(files).items()):
        if not any(is_numbered(name) or parse_part_name(name) for name in names):
            continue
        table = path
        parent, _, folder_name = path.rpartition("/")
        if step_of(folder_name) is not None:
            table = parent
        whole = tables.setdefault(table, [])
        try:
            folder = _folder(fs, root, path, names)
        except (StorageError, OSError) as error:
            damaged += [] if _is_spent(fs, root, path) else [(path, str(error))]
            continue
        if folder.parts:
            whole.append(folder)
        if folder.committed:
            present.add(path)
        elif path in due:
            damaged.append((path, "its record is gone, which lists the parts that count"))
            continue
        if folder.others:
            findings.append(RunFinding(path, PartState.UNFINISHED, *_left_over(folder)))
    known = present | {path for path, _ in damaged}
    damaged += [(path, "it is gone: this step was committed") for path in sorted(set(due) - known)]
    # a whole table from which a step can go on, by the step's folder name
    frontiers: dict[str, str] = {}
    for table, folders in tables.items():
        of_table = list(_damages(fs, root, files, folders, read))
        damaged += [(path, text) for path, text in of_table if not _is_spent(fs, root, path)]
        damaged_paths = {path for path, _ in of_table}
        counted = [folder for folder in folders if folder.path not in damaged_paths]
        for folder in counted:
            if folder.frontier:
                _, _, step_name = folder.path.rpartition("/")
                frontiers[step_name] = table
        if counted:
            findings.append(RunFinding(table, PartState.WHOLE, _told(counted)))
    for path, text in damaged:
        _, _, step_name = path.rpartition("/")
        remedy = _remedy(path, resumed, frontiers.get(step_name))
        findings.append(RunFinding(path, PartState.DAMAGED, text, remedy))
    return sorted(
        findings,
        key=lambda finding: (finding.part.split("/")[0], finding.state is not PartState.WHOLE),
    )


def _is_spent(fs: AbstractFileSystem, root: str, path: str) -> bool:
    """Tell whether a stage has lost its record since it was listed: a run that is under way
    deletes it first.
    """
    if not path.startswith(f"{STAGES}/"):
        return False
    return record_name(list_files(fs, at(root, path))) is None


def _folder(fs: AbstractFileSystem, root: str, path: str, names: Mapping[str, int]) -> _Folder:
    """Return the parts that count in a folder. StorageError for a damaged record or footer."""
    record = newest_record(fs, root, path, names)
    there = [
        name
        for name in names
        if parse_part_name(name) or (is_numbered(name) and not name.endswith(".json"))
    ]
    if record is not None:
        table, _, name = path.rpartition("/")
        step = step_of(name)
        if step is not None and (wrong := misplaced(record, table, step)):
            raise StorageError(wrong)
        listed = {part.path for part in record.parts}
        return _Folder(path, record.parts, len(set(there) - listed), frontier=SPENT in record.about)
    complete = newest_parts(there) if path.startswith(f"{TRACE}/") else complete_names(there) or []
    parts = [
        Part(name, names[name], read_footer(fs, at(root, f"{path}/{name}")).groups)
        for name in complete
    ]
    return _Folder(path, tuple(parts), len(there) - len(parts), committed=bool(parts))


def _damages(
    fs: AbstractFileSystem,
    root: str,
    files: Mapping[str, int],
    folders: list[_Folder],
    read: Callable[[int], None],
) -> Iterator[tuple[str, str]]:
    """Yield path and damage of each part that is not what was written."""

    def damage(item: tuple[str, Part]) -> str:
        path, part = item
        text = _damage(fs, root, files, path, part)
        read(part.nbytes)
        return text

    parts = [(f"{folder.path}/{part.path}", part) for folder in folders for part in folder.parts]
    with ThreadPoolExecutor(_READERS) as pool:
        for (path, _), text in zip(parts, pool.map(damage, parts), strict=True):
            if text:
                yield path.rpartition("/")[0], text


def _damage(
    fs: AbstractFileSystem,
    root: str,
    files: Mapping[str, int],
    path: str,
    part: Part,
) -> str:
    """Return what is wrong with a part; empty if nothing is."""
    where = at(root, path)
    name = path.rpartition("/")[2]
    if path not in files:
        return f"{name} is gone"
    if files[path] != part.nbytes:
        return f"{name} has {files[path]} bytes, and {part.nbytes} were written"
    try:
        written = _digest(part)
        if written:
            found = digest_file(fs, where).sha256
            if found == written:
                return ""
            return f"{name} has the SHA-256 {found[:16]}..., not {written[:16]}..."
        columns = read_footer(fs, where).schema.names
        for index in range(len(part.groups)):
            read_rows(fs, where, index, columns, part.groups)
    except (CorruptPart, TooLarge) as error:
        return str(error)
    except FileNotFoundError:
        return f"{name} is gone"
    return ""


def _digest(part: Part) -> str | None:
    """Return the SHA-256 that the part's record has; None in records of earlier versions."""
    written: str | None = getattr(part, "sha256", None)
    return written


def _told(folders: list[_Folder]) -> str:
    parts = [part for folder in folders for part in folder.parts]
    digests = sum(_digest(part) is not None for part in parts)
    how = "their checksums"
    if digests == len(parts):
        how = "their SHA-256"
    elif not digests:
        how = "their pages' checksums"
    steps = counted(len(folders), "step")
    return (
        f"{steps}, {counted(len(parts), 'part')}, {sum(part.nbytes for part in parts):,} bytes, by "
        f"{how}"
    )


def _left_over(folder: _Folder) -> tuple[str, str]:
    if folder.parts:
        return (
            f"{counted(folder.others, 'part')} of an earlier start that no record lists",
            "nothing reads them",
        )
    return (
        f"{counted(folder.others, 'part')} of a step that is under way or was never finished",
        "a resume does it again",
    )


def _remedy(path: str, resumed: int, frontier: str | None) -> str:
    """Return what a resume makes of damaged rows; ``frontier`` is a whole table from which the
    step can go on.
    """
    table, _, name = path.rpartition("/")
    step = step_of(name)
    if step is not None and (table == _ALWAYS_AGAIN or step > resumed):
        anew = "generates this step and the later ones again"
        if frontier:
            anew = f"takes this step from {frontier}"
        if resumed:
            return f"a resume goes on after step {resumed}, and {anew}"
        return f"a resume {anew}"
    return "its rows are lost, unless there is a copy; a resume goes on without them"
