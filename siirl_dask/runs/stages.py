"""Stages: the rows of a step that are stored before the step is done, from which a later start replays it.

    <run.url>/stages/rollout/step=000007/part-0003-00000.parquet    written by a worker of attempt 3
                                         _parts-0003.json           created exclusively when all parts are written
              rollouts/step=000007/...                              the same, and the stage before it goes

The record says which run's rows these are (``RunIdentity.digest``), what the step had logged by then, whether a step
can go on from this table, and which stages it does not need any more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsspec import AbstractFileSystem
from siirl_storage import (
    FileDigest,
    Part,
    PartsRecord,
    StorageError,
    list_files,
    newest_record,
    open_fs,
)

from siirl_dask.context import Metric
from siirl_dask.observe import pack, unpack
from siirl_dask.tables import step_folder
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.runs")
SPENT = "spent"
"""Key in a record, which has it if a step can go on from the table: tables of stages that it
does not need then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The stored rows of one table at one step."""

    step: int
    table: str
    """Folder of the table below the run's."""
    url: str
    parts: tuple[Part, ...]
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Metrics that the step had logged by then, on all workers."""
    position: int | None = None
    """Number of the dataloader's next prompt, where the step has drawn more prompts than its
    own."""

    @property
    def files(self) -> dict[str, FileDigest]:
        """Digests of its files by name."""
        return {part.path: FileDigest(part.nbytes, part.sha256 or "") for part in self.parts}


def describe_stage(
    *,
    step: int,
    table: str,
    digest: str,
    attempt: int,
    metrics: Mapping[str, Metric],
    position: int | None,
    spent: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return what the record of ``table`` at ``step`` says beside its parts, for ``commit_parts``.

    ``digest`` is that of the run's identity. Metrics are a JSON text: some are not finite.
    ``spent`` are the tables of stages that the step does not need once it has this one; None for a
    table from which no step can go on.
    """
    about = {
        "step": step,
        "table": table,
        "run": digest,
        "attempt": attempt,
        "position": position,
        "metrics": json.dumps(pack(metrics)),
    }
    if spent is None:
        return about
    return about | {SPENT: list(spent)}


def misplaced(record: PartsRecord, table: str, step: int) -> str:
    """Return where the rows of a record belong, if that is not ``table`` at ``step``; else an empty
    text.

    Records of earlier versions do not say it.
    """
    said = record.about.get("step", step), record.about.get("table", table)
    if said == (step, table):
        return ""
    return f"its record says that these are the rows of {said[1]!r} at step {said[0]}"


def find_stages(
    run_url: str,
    tables: Sequence[str],
    after: int,
    digests: Collection[str],
) -> list[Stage]:
    """Return a stage of each step from ``after + 1`` on, up to the first step without one.

    Of the ``tables`` the first one counts that has the step. It has it when the record is that of a
    run with one of these ``digests`` of its identity, and all parts are there.
    """
    stages: list[Stage] = []
    step = after + 1
    while (stage := find_stage(run_url, tables, step, digests)) is not None:
        stages.append(stage)
        step += 1
    return stages


def find_stage(
    run_url: str,
    tables: Iterable[str],
    step: int,
    digests: Collection[str],
) -> Stage | None:
    """Return the stage of ``step`` in the first of the ``tables`` that has it; None if none has."""
    found = (_read_stage(run_url, table, step, digests) for table in tables)
    return next((stage for stage in found if stage is not None), None)


def spent_by(
    fs: AbstractFileSystem,
    root: str,
    folder: str,
    names: Mapping[str, int],
) -> tuple[str, ...] | None:
    """Return the tables of stages that a step does not need, since it can go on from the table in
    ``folder``.

    ``names`` has the sizes of the files there. None where no step can go on from it, or a part of
    it is missing. StorageError for a damaged record.
    """
    record = newest_record(fs, root, folder, names)
    if record is None or any(names.get(part.path) != part.nbytes for part in record.parts):
        return None
    spent = record.about.get(SPENT)
    if isinstance(spent, list):
        return tuple(map(str, spent))
    return None


def _read_stage(run_url: str, table: str, step: int, digests: Collection[str]) -> Stage | None:
    """Return the stage of ``step`` in ``table``; None if there is none of these ``digests``, or it
    is not whole.
    """
    url = step_folder(run_url, table, step)
    fs, root = open_fs(url)
    names = list_files(fs, root)
    try:
        record = newest_record(fs, root, "", names)
        if (
            record is None
            or record.about.get("run") not in digests
            or not all(part.sha256 for part in record.parts)
        ):
            return None
        wrong = misplaced(record, table, step)
        if wrong:
            raise ValueError(wrong)
        position = record.about["position"]
        if position is not None and (type(position) is not int or position < 0):
            raise ValueError(f"position {position!r}")
        metrics = unpack(json.loads(record.about["metrics"]))
    except (StorageError, KeyError, TypeError, ValueError, RecursionError) as error:
        text = redacted(
            f"the record of the rows in {url} is damaged: {type(error).__name__}: {error}"
        )
        logger.warning("%s", text)
        return None
    gone = [part.path for part in record.parts if names.get(part.path) != part.nbytes]
    if gone:
        logger.warning(
            "the rows in %s are not whole: %s is gone, or has another size", redacted(url), gone[0]
        )
        return None
    return Stage(
        step=step,
        table=table,
        url=url,
        parts=record.parts,
        metrics=metrics,
        position=position,
    )
