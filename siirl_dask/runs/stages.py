"""Stages: the rows of a step that are stored before the step is done, from which a later start replays it.

    <run.url>/rollouts/step=000007/part-0003-00000.parquet    written by a worker of attempt 3
                                   _parts-0003.json           created exclusively when all parts are written

The record says which run's rows these are (``RunIdentity.digest``), and what the step had logged by then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from siirl_storage import Part, StorageError, read_record
from siirl_storage.digests import FileDigest

from siirl_dask.context import Metric
from siirl_dask.coordinator.stored_rows import step_folder
from siirl_dask.observe.metrics import pack, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The stored rows of one table at one step."""

    step: int
    url: str
    parts: tuple[Part, ...]
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Metrics that the step had logged by then, on all workers."""
    position: int | None = None
    """Number of the dataloader's next prompt, where the step has drawn more prompts than its own."""

    @property
    def files(self) -> dict[str, FileDigest]:
        """Digests of its files by name."""
        return {part.path: FileDigest(part.nbytes, part.sha256 or "") for part in self.parts}


def describe_stage(*, digest: str, attempt: int, metrics: Mapping[str, Metric], position: int | None) -> dict[str, Any]:
    """Return what the record of a stage says beside its parts, for ``commit_parts``.

    ``digest`` is that of the run's identity. Metrics are a JSON text: some are not finite.
    """
    return {"run": digest, "attempt": attempt, "position": position, "metrics": json.dumps(pack(metrics))}


def find_stages(run_url: str, table: str, after: int, digest: str) -> list[Stage]:
    """Return the stages of ``table`` from step ``after + 1`` on, up to the first step without one.

    A step counts when its record is that of a run with this ``digest`` of its identity, and all its parts are there.
    """
    stages: list[Stage] = []
    step = after + 1
    while (stage := _read_stage(run_url, table, step, digest)) is not None:
        stages.append(stage)
        step += 1
    return stages


def _read_stage(run_url: str, table: str, step: int, digest: str) -> Stage | None:
    url = step_folder(run_url, table, step)
    try:
        record = read_record(url)
        if record is None or record.about.get("run") != digest or not all(part.sha256 for part in record.parts):
            return None
        position = record.about["position"]
        if position is not None and (type(position) is not int or position < 0):
            return None
        metrics = unpack(json.loads(record.about["metrics"]))
    except (StorageError, KeyError, TypeError, ValueError, RecursionError):
        return None  # a damaged record: the step is done anew
    return Stage(step=step, url=url, parts=record.parts, metrics=metrics, position=position)
