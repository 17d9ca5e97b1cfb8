"""The metrics of a run: the workers' metrics are merged, and ``<run.url>/metrics.jsonl`` gets one
JSON line per step.

metrics = merge([unpack(message) for message in messages])      # in worker order: equal to the last
bit each time log.write(Record(step=7, phase="train", seconds=1.9, metrics=values(metrics)))
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict, TypeGuard

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import full_disk_named, join, open_fs, write_atomic

from siirl_dask.context import Metric, Reduce
from siirl_dask.errors import DataError
from siirl_dask.observe.own_digest import KEY, is_as_written, own_digest
from siirl_dask.planner import Phase

Message = dict[str, list[Any]]
"""Packed metrics, as they travel from a worker to the driver."""

METRICS_FILE = "metrics.jsonl"
STEP_SECONDS = "step_seconds"
"""Metric: seconds of the worker whose chain took longest, by that worker's own clock."""
MEASURED = (Phase.TRAIN, Phase.VALIDATION, Phase.TEST)
"""Phases whose iterations are recorded."""


class Record(TypedDict):
    """A line of the file: a training step, or a pass over the validation or test data."""

    step: int
    """Training: number of the step, from 1. Validation and test: steps trained before."""
    phase: Phase
    seconds: float
    metrics: dict[str, float | None]
    """Values by name; None where nothing was logged and, in a record read back, where the value
    was not finite."""


def pack(metrics: Mapping[str, Metric]) -> Message:
    """Return ``{name: [reducer, weight, total, squares, low, high]}``, about 60 bytes a metric
    in msgpack.
    """
    return {
        name: [m.reduce.value, m.weight, m.total, m.squares, m.low, m.high]
        for name, m in metrics.items()
    }


def unpack(message: object) -> dict[str, Metric]:
    """Return the metrics of a message. ValueError naming the metric if it is malformed: it came
    over the network.
    """
    if not isinstance(message, dict):
        raise ValueError(f"a message of metrics is a dict, not {type(message).__name__}")
    return {_checked_name(name): _unpack_one(name, entry) for name, entry in message.items()}


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"a metric's name is printable text, not {name!r}")
    return name


def _unpack_one(name: object, entry: object) -> Metric:
    match entry:
        case [str(reduce), *rest] if reduce in set(Reduce) and len(rest) == 5:
            numbers = _numbers(rest)
        case _:
            numbers = []
    if len(numbers) != 5:
        raise ValueError(
            f"metric {name!r}: expected [reducer, weight, total, squares, low, high], got "
            f"{entry!r:.200}"
        )
    weight, total, squares, low, high = numbers
    if not 0 <= weight < math.inf:
        raise ValueError(f"metric {name!r}: weight {weight} is not a finite number from 0")
    return Metric(Reduce(reduce), weight, total=total, squares=squares, low=low, high=high)


def _numbers(entries: Iterable[object]) -> list[float]:
    return [float(entry) for entry in entries if _is_number(entry)]


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a float, or an integer that msgpack can hold (larger ones
    overflow ``float``).
    """
    if isinstance(value, float):
        return True
    if type(value) is not int:
        return False
    return abs(value) < 2**64


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several workers; the parts stay unchanged. ValueError if two disagree
    on a reducer.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = replace(metric)
                continue
            try:
                merged[name].merge(metric)
            except ValueError as error:
                raise ValueError(f"metric {name!r}: {error}") from error
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float | None]:
    """Return the value of each metric, sorted by name; None where nothing was logged."""
    return {name: metrics[name].value for name in sorted(metrics)}


class MetricsLog:
    """Appends records to ``<url>/metrics.jsonl``; each is on the disk, or in the store, when
    ``write`` returns.

    Only local files are appended to. Elsewhere the whole file is written again: object stores
    cannot append, and gcsfs answers mode ``ab`` by overwriting. A step is about 1 kB, so after
    1,000 steps each costs 1 MB.
    """

    def __init__(self, url: str, until: int | None = None, attempt: int = 0) -> None:
        """Open the log; records of steps after ``until`` are dropped, since a resumed run repeats
        them.

        ``attempt`` numbers the start of the run: of two records of one step, that of the later
        start counts.
        """
        self._attempt = attempt
        self._fs, self._path = open_fs(join(url, METRICS_FILE))
        self._appends = isinstance(self._fs, LocalFileSystem)
        written = b""
        if self._fs.exists(self._path):
            written = self._fs.cat_file(self._path)
        whole = whole_lines(written)
        if until is not None:
            records = [
                (line, decode(line, join(url, METRICS_FILE)))
                for line in whole.splitlines(keepends=True)
            ]
            whole = b"".join(line for line, (record, _) in records if record["step"] <= until)
        # the last start was killed while writing; or this run is new
        if whole != written or not written:
            write_atomic(self._fs, self._path, whole)
        self._written = whole
        if self._appends:
            self._written = b""

    def write(self, record: Record) -> None:
        """Append a record."""
        line = encode(record, self._attempt)
        if self._appends:
            with full_disk_named(self._path, len(line)), self._fs.open(self._path, "ab") as file:
                file.write(line)
                file.flush()
                # a checkpoint of this step survives a power cut, and so must its metrics
                os.fsync(file.fileno())
        else:
            self._written += line
            write_atomic(self._fs, self._path, self._written)


def read_metrics(url: str) -> list[Record]:
    """Return every record of the run at ``url``, by step; the last one of the latest start where a
    step was repeated.

    A last line without a line break was cut short, and is left out. DataError for any other line
    that is no record.
    """
    return [record for record, _ in read_attempts(url)]


def read_attempts(url: str) -> list[tuple[Record, int]]:
    """Return what ``read_metrics`` does, each record with the number of the start of the run that
    wrote it.

    It is 0 where an earlier version did.
    """
    name = join(url, METRICS_FILE)
    fs, path = open_fs(name)
    try:
        text = fs.cat_file(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{name} does not exist: no step of this run has finished, or the run is elsewhere"
        ) from error
    return parse_attempts(text, name)


def parse_attempts(text: bytes, name: str) -> list[tuple[Record, int]]:
    """Return what ``read_attempts`` does of a file's text; ``name`` is the file's, for errors."""
    lines = enumerate(whole_lines(text).splitlines(), start=1)
    return last_records(decode(line, f"{name}, line {number}") for number, line in lines)


def last_records(written: Iterable[tuple[Record, int]]) -> list[tuple[Record, int]]:
    """Return the records that count, by step: of several of one step, the last one of the latest
    start.
    """
    last: dict[tuple[Phase, int], tuple[Record, int]] = {}
    for record, attempt in written:
        key = record["phase"], record["step"]
        if key not in last or attempt >= last[key][1]:
            last.pop(key, None)
            last[key] = record, attempt
    return sorted(last.values(), key=lambda pair: pair[0]["step"])


def damaged_lines(url: str) -> tuple[list[str], bool]:
    """Return what is wrong with each line of the run at ``url`` that is no record, and whether the
    last was cut short.

    A line that is one, and not as it was written, has another digest than it says; readers do not
    compare that. FileNotFoundError without a file.
    """
    name = join(url, METRICS_FILE)
    fs, path = open_fs(name)
    text = fs.cat_file(path)
    whole = whole_lines(text)
    wrong = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            decode(line, f"line {number}")
        except DataError as error:
            wrong.append(f"{error}; a resume refuses: remove the line")
            continue
        fields = json.loads(line)
        if not is_as_written(fields):
            wrong.append(
                f"line {number} was altered: its digest is another one; its numbers cannot be "
                "trusted"
            )
    return wrong, whole != text


def whole_lines(text: bytes) -> bytes:
    """Return the text up to its last line break."""
    return text[: text.rfind(b"\n") + 1]


def encode(record: Record, attempt: int) -> bytes:
    """Return the line of a record that the start ``attempt`` of the run writes."""
    finite = {name: _finite(value) for name, value in record["metrics"].items()}
    line: dict[str, Any] = {
        "step": record["step"],
        "phase": str(record["phase"]),
        "seconds": _finite(record["seconds"]),
        "metrics": finite,
        "attempt": attempt,
    }
    line[KEY] = own_digest(line)
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None  # JSON has no NaN


def decode(line: bytes, where: str) -> tuple[Record, int]:
    """Return the record of a line and the number of the start that wrote it, 0 where an earlier
    version did.

    DataError, which begins with ``where``, for a line that is none.
    """
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    match fields:
        case {
            "step": int(step),
            "phase": phase,
            "seconds": float() | int() as seconds,
            "metrics": dict(metrics),
        } if phase in MEASURED and all(
            value is None or _is_number(value) for value in metrics.values()
        ):
            attempt = fields.get("attempt", 0)
            record = Record(step=step, phase=Phase(phase), seconds=float(seconds), metrics=metrics)
            return record, attempt if type(attempt) is int else 0
    raise DataError(f"{where}: expected step, phase, seconds and metrics, got {fields!r:.200}")


# Metrics of single agents: a run with several logs ``a/policy/loss`` and ``b/policy/loss``.


def agents_with(records: Iterable[Record], metric: str) -> list[str]:
    """Return the agents that logged a metric of their own by this name, in alphabetical order."""
    ending = f"/{metric}"
    agents = set()
    for record in records:
        for name in record["metrics"]:
            if _ends(name, ending):
                agents.add(name.removesuffix(ending))
    return sorted(agents)


def common_name(name: str, known: Iterable[str]) -> str:
    """Return the one of the ``known`` metrics that an agent's metric is, and any other name as
    it is.
    """
    return next((metric for metric in known if _ends(name, f"/{metric}")), name)


def _ends(name: str, ending: str) -> bool:
    if not name.endswith(ending):
        return False
    return "/" not in name.removesuffix(ending)
