"""Reads what the workers of a run did, from its table ``trace``; also while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import StorageError, by_folder, join, list_files, newest_parts, open_fs
from siirl_storage.files import at
from siirl_storage.reading import read_part

from siirl_dask.errors import DataError, counted
from siirl_dask.observe import Slowest
from siirl_dask.observe.trace.bottleneck import find_bottleneck
from siirl_dask.observe.trace.trace_table import TraceSpan, read_spans
from siirl_dask.planner import TRACE
from siirl_dask.runs.samples.rollouts import in_words
from siirl_dask.tables import step_name, step_of
from siirl_dask.trace import Lane

logger = logging.getLogger("siirl_dask.runs")
_READERS = 16  # of an object store, where each part costs a round trip
_MOST_BYTES = 2**27  # of a part, decoded; a worker writes some hundred kilobytes
RECENT_STEPS = 10
RECENT_BYTES = 2**22
RECENT_PARTS = 64
"""Newest steps of which every view tells what took longest, as far as they fit into so many bytes
and parts."""
MOST_BYTES = 2**25
"""Bytes of parts, about a million and a half spans, that are read at once."""


Parts = Mapping[tuple[str, int], pa.Table]
"""Parts of a trace by their paths and sizes. A part that is written again has more rows."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of all workers of a run, in some of its steps."""

    spans: Sequence[TraceSpan]
    """In the order of their starts, by one clock."""
    steps: Sequence[int]
    """Steps that were read, ascending."""
    all_steps: Sequence[int]
    """Steps of which the run has a trace, ascending."""
    parts: Parts = field(default_factory=dict)
    """The parts that were read, as ``read_newest`` keeps them."""


def slowest_of(url: str) -> Slowest | None:
    """Return what took longest in the last steps of the run at ``url``; None where its trace cannot
    tell.

    Few steps are read, so that it takes a second at most where a store is far away.
    """
    try:
        trace = read_recent(url)
    except DataError as error:
        logger.info("nothing is known of what took longest: %s", error)
        return None
    return slowest_in(trace)


def slowest_in(trace: Trace) -> Slowest | None:
    """Return what took longest in a trace; None where no node has run."""
    slowest = find_bottleneck(trace.spans).slowest
    if slowest is None:
        return None
    return Slowest(
        node=slowest.node,
        worker=slowest.worker,
        share=slowest.share,
        times_others=slowest.times_others,
        steps=len(trace.steps),
    )


def read_recent(url: str) -> Trace:
    """Return the trace of the newest steps of the run at ``url``, of which all views tell what took
    longest. DataError as in ``read_trace``.
    """
    return read_trace(
        url,
        most_bytes=RECENT_BYTES,
        most_parts=RECENT_PARTS,
        most_steps=RECENT_STEPS,
    )


def read_trace(
    url: str,
    steps: range | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    most_parts: int | None = None,
    most_steps: int | None = None,
) -> Trace:
    """Return the trace of the run at ``url``: of ``steps``, or without them of the newest ones that
    fit into ``most_bytes``, ``most_parts`` and ``most_steps``, one at least.

    Of a step that several starts of the run have done, the last start counts. DataError where there
    is no trace or no such step, where the steps have more than ``most_bytes``, and for damaged
    parts.
    """
    try:
        fs, root = open_fs(join(url, TRACE))
        files = list_files(fs, root)
    except StorageError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise DataError(f"{url!r} cannot be read: {type(error).__name__}: {error}") from error
    parts = _parts(files)
    if not parts:
        raise DataError(
            f"{url!r} holds no trace: expected the folder of a run that has finished a step with "
            "observe.trace=true"
        )
    if steps is None:
        chosen = _newest(parts, files, most_bytes, most_parts, most_steps)
    else:
        chosen = _asked(url, parts, files, steps, most_bytes)
    return Trace(_spans(fs, root, parts, chosen), chosen, sorted(parts))


def read_newest(
    url: str,
    steps: Sequence[int],
    *,
    most_bytes: int,
    most_parts: int,
    counts: Collection[Lane] | None = None,
    known: Parts | None = None,
) -> Trace | None:
    """Return the trace of the newest of ``steps`` that there are and fit, one at least; no other
    step is looked for.

    ``counts`` are the lanes whose counts are read as well, None: all. ``known`` are the parts of an
    earlier reading, which are not read again; None is returned where there are no others.

    DataError for a store that cannot be read, and for damaged parts. A trace without spans where
    there is none.
    """
    try:
        fs, root = open_fs(join(url, TRACE))
        files = {}
        for step in steps:
            folder = step_name(step)
            for name, size in list_files(fs, at(root, folder)).items():
                files[f"{folder}/{name}"] = size
    except StorageError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise DataError(f"{url!r} cannot be read: {type(error).__name__}: {error}") from error
    parts = _parts(files)
    chosen = _newest(parts, files, most_bytes, most_parts) if parts else []
    keys = [(step, (path, files[path])) for step in chosen for path in parts[step]]
    held = {} if known is None else known
    if known is not None and held.keys() == {key for _, key in keys}:
        return None
    with _readers(fs) as pool:
        tables = list(
            pool.map(lambda item: held.get(item[1]) or _read(fs, at(root, item[1][0])), keys)
        )
    read = zip((step for step, _ in keys), tables, strict=True)
    return Trace(
        read_spans(read, counts),
        chosen,
        sorted(parts),
        {key: one for (_, key), one in zip(keys, tables, strict=True)},
    )


def _spans(
    fs: AbstractFileSystem,
    root: str,
    parts: Mapping[int, Sequence[str]],
    steps: Sequence[int],
) -> list[TraceSpan]:
    paths = [(step, at(root, path)) for step in steps for path in parts[step]]
    with _readers(fs) as pool:
        return read_spans(pool.map(lambda item: (item[0], _read(fs, item[1])), paths))


def _readers(fs: AbstractFileSystem) -> ThreadPoolExecutor:
    """Return threads that read parts: one of a local folder, where many take three times as long
    for the lock of the interpreter.
    """
    return ThreadPoolExecutor(1 if isinstance(fs, LocalFileSystem) else _READERS)


def _parts(files: Mapping[str, int]) -> dict[int, list[str]]:
    """Return the paths of the parts that count, by step."""
    found = {}
    for folder, names in by_folder(files).items():
        step = step_of(folder)
        if step is not None and (newest := newest_parts(names)):
            found[step] = [f"{folder}/{name}" for name in newest]
    return found


def _newest(
    parts: Mapping[int, Sequence[str]],
    files: Mapping[str, int],
    most_bytes: int,
    most_parts: int | None,
    most_steps: int | None = None,
) -> list[int]:
    """Return the newest steps that fit, ascending, one at least."""
    newest: list[int] = []
    nbytes = 0
    count = 0
    for step in sorted(parts, reverse=True):
        nbytes += sum(files[path] for path in parts[step])
        count += len(parts[step])
        if newest and (nbytes > most_bytes or (most_parts is not None and count > most_parts)):
            break
        if len(newest) == most_steps:
            break
        newest.append(step)
    return newest[::-1]


def _asked(
    url: str,
    parts: Mapping[int, Sequence[str]],
    files: Mapping[str, int],
    steps: range,
    most_bytes: int,
) -> list[int]:
    """Return those of the steps that there are, ascending. DataError for none, or for too many."""
    sizes = {step: sum(files[path] for path in paths) for step, paths in parts.items()}
    chosen = sorted(step for step in parts if step in steps)
    if not chosen:
        there = f"{counted(len(parts), 'step')}, {min(parts)} to {max(parts)}"
        raise DataError(f"{url!r} has no trace of {in_words(steps)}: it has {there}")
    total = sum(sizes[step] for step in chosen)
    if total > most_bytes and len(chosen) > 1:
        raise DataError(
            f"the trace of {in_words(steps)} has {total:,} bytes, more than the {most_bytes:,} "
            "that are read at once: ask for fewer steps"
        )
    return chosen


def _read(fs: AbstractFileSystem, path: str) -> pa.Table:
    try:
        return read_part(fs, path, max_bytes=_MOST_BYTES)
    except StorageError as error:
        raise DataError(f"a part of the trace cannot be read: {error}") from error
