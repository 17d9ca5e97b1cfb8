"""``<run.url>/summary.json``: how a run ended, in numbers a script can compare. Written however it ends."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from siirl_storage import join, open_fs, write_atomic

from siirl_dask import __version__
from siirl_dask.errors import DataError

FILE = "summary.json"


class Status(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Mean reward on data that is not trained on; null where it was not measured."""

    first: float | None = None
    """On the validation data, before the first step."""
    last: float | None = None
    """On the validation data, the last time it was measured."""
    test: float | None = None
    """On the test data, which is touched once, after the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesPerStep:
    """Bytes that moved for an average step; null where they cannot be measured."""

    peers: float | None = None
    """From worker to worker."""
    scheduler_and_client: float | None = None
    """Through the scheduler and the client: none of it samples or weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    run_id: str
    status: Status
    error: str | None = None
    """What stopped a run that failed or was interrupted."""
    steps: int
    """Steps trained."""
    workers: int
    seconds: float
    """From the first step's start to the last one's end, validation included, set-up not."""
    samples_per_second: float | None
    """Responses generated and trained on, over ``seconds``; null if no step was finished."""
    validation: Accuracy = field(default_factory=Accuracy)
    bytes_per_step: BytesPerStep = field(default_factory=BytesPerStep)
    version: str = __version__
    """Of siirl_dask."""

    def to_json(self) -> str:
        return json.dumps(_without_nan(asdict(self)), indent=2, allow_nan=False) + "\n"


def write_summary(url: str, summary: Summary) -> None:
    """Write or replace ``<url>/summary.json``, atomically."""
    fs, path = open_fs(join(url, FILE))
    write_atomic(fs, path, summary.to_json().encode())


def read_summary(url: str) -> Summary:
    """The summary of the run at ``url``, without fields that a newer version added. DataError if it is no summary."""
    name = join(url, FILE)
    fs, path = open_fs(name)
    try:
        found = json.loads(fs.cat_file(path))
        known = _known(Summary, found)
        known["status"] = Status(known["status"])
        known["validation"] = Accuracy(**_known(Accuracy, known["validation"]))
        known["bytes_per_step"] = BytesPerStep(**_known(BytesPerStep, known["bytes_per_step"]))
        return Summary(**known)
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist: the run is under way, was killed, or is elsewhere") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name} is not a run's summary: {type(error).__name__}: {error}") from error


def _known(kind: type[Any], found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"expected an object for {kind.__name__}, got {found!r:.200}")
    return {f.name: found[f.name] for f in fields(kind) if f.name in found}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
