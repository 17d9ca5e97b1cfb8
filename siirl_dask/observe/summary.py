"""``<run.url>/summary.json`` says how a run ended, in numbers that a script can compare. Every
run writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from siirl_storage import join, open_fs, write_atomic

from siirl_dask import __version__
from siirl_dask.errors import DataError
from siirl_dask.observe.own_digest import KEY, is_as_written, own_digest

SUMMARY_FILE = "summary.json"


class Status(StrEnum):
    """The ways in which a run ends."""

    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Mean rewards on held-out data; null where not measured."""

    first: float | None = None
    """Mean reward on the validation data before the first step."""
    last: float | None = None
    """Mean reward of the last validation."""
    test: float | None = None
    """Mean reward on the test data, which is used once, after the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesPerStep:
    """Bytes moved in an average step; null where they cannot be measured."""

    peers: float | None = None
    """Bytes from worker to worker."""
    scheduler_and_client: float | None = None
    """Bytes through the scheduler and the client, none of them samples or weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """A failure after which the run went on by itself, or another number of workers."""

    cause: str
    """Text of the failure, or what became of the workers."""
    steps: int
    """Steps that were done."""
    silence: float | None = None
    """Seconds from the last sign of life of the worker that was lost until that was noticed;
    null if unknown."""
    seconds: float = 0.0
    """Seconds from then until all workers were at work again."""
    steps_again: int = 0
    """Steps that were repeated."""
    workers: int | None = None
    """Workers with which it went on; null in a summary of an earlier version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The node that took longest in the last steps, on the worker where it did."""

    node: str
    worker: str
    share: float
    """Share of the time of these steps, without waits for other workers."""
    times_others: float | None = None
    """Its time divided by the median of the other workers' that run the node; null if there are
    none."""
    steps: int
    """Steps that were looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """The error that ended a run, by its parts; null where one is not known."""

    kind: str
    """Name of the exception's class."""
    message: str
    worker: str | None = None
    host: str | None = None
    node: str | None = None
    iteration: str | None = None
    """Such as ``train step 3``."""
    rows: Sequence[int] = ()
    """Row ids within that step, some of them where there are many."""
    resume: str | None = None
    """Command that resumes the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The content of ``summary.json``."""

    run_id: str
    """``run.name``."""
    status: Status
    error: str | None = None
    """Error that stopped the run; None when it is complete."""
    failure: RunFailure | None = None
    """The same error by its parts."""
    steps: int
    """Steps trained."""
    workers: int
    seconds: float
    """Seconds from the first step's start to the last one's end, with validation and without
    set-up."""
    samples_per_second: float | None
    """Responses trained on, divided by ``seconds``; null if no step was finished."""
    validation: Accuracy = field(default_factory=Accuracy)
    bytes_per_step: BytesPerStep = field(default_factory=BytesPerStep)
    restarts: Sequence[Restart] = ()
    """Failures after which this start of the run went on by itself, and changes of the number of
    workers."""
    slowest: Slowest | None = None
    """The node that took longest; null without a trace (``observe.trace``)."""
    warnings: Sequence[str] = ()
    """A sentence about each thing that drifted, and about steps that were left out."""
    version: str = __version__
    """Version of siirl_dask that ended the run."""

    def to_json(self) -> str:
        """Return the text of ``summary.json``, with a digest of itself; numbers that are not
        finite become null.
        """
        written = _without_nan(asdict(self))
        written[KEY] = own_digest(written)
        return json.dumps(written, indent=2, allow_nan=False) + "\n"


def write_summary(url: str, summary: Summary) -> None:
    """Write or replace ``<url>/summary.json``, atomically."""
    fs, path = open_fs(join(url, SUMMARY_FILE))
    write_atomic(fs, path, summary.to_json().encode())


def read_summary(url: str) -> Summary:
    """Return the summary of the run at ``url``, without unknown fields. DataError if it is
    absent or damaged.
    """
    name = join(url, SUMMARY_FILE)
    fs, path = open_fs(name)
    try:
        known = _known(Summary, json.loads(fs.cat_file(path)))
        known["status"] = Status(known["status"])
        known["validation"] = Accuracy(**_known(Accuracy, known["validation"]))
        known["bytes_per_step"] = BytesPerStep(**_known(BytesPerStep, known["bytes_per_step"]))
        known["restarts"] = tuple(
            Restart(**_known(Restart, one)) for one in known.get("restarts", ())
        )
        if known.get("slowest") is not None:
            known["slowest"] = Slowest(**_known(Slowest, known["slowest"]))
        if known.get("failure") is not None:
            known["failure"] = RunFailure(**_known(RunFailure, known["failure"]))
            known["failure"] = replace(known["failure"], rows=tuple(known["failure"].rows))
        known["warnings"] = tuple(known.get("warnings", ()))
        summary = Summary(**known)
        _check_numbers(summary)
        return summary
    except FileNotFoundError as error:
        raise DataError(
            f"{name} does not exist: the run is under way, was killed, or is elsewhere"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{name} is not a run's summary: {type(error).__name__}: {error}"
        ) from error


def _check_numbers(summary: Summary) -> None:
    """Raise TypeError for texts and the like where a summary has numbers."""
    scores = summary.validation
    for name, value in (
        ("steps", summary.steps),
        ("seconds", summary.seconds),
        ("workers", summary.workers),
    ):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected a number, got {value!r:.200}")
    for name, score in (("first", scores.first), ("last", scores.last), ("test", scores.test)):
        if score is not None and not isinstance(score, (int, float)):
            raise TypeError(f"validation.{name}: expected a number, got {score!r:.200}")


def summary_altered(url: str) -> bool:
    """Tell whether the summary of the run at ``url`` has another digest than it says, which readers
    do not compare.

    DataError as in ``read_summary``.
    """
    read_summary(url)
    fs, path = open_fs(join(url, SUMMARY_FILE))
    return not is_as_written(json.loads(fs.cat_file(path)))


def _known(kind: type[Any], values: object) -> dict[str, Any]:
    """Return the values of the fields that ``kind`` has."""
    if not isinstance(values, dict):
        raise TypeError(f"expected an object for {kind.__name__}, got {values!r:.200}")
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
