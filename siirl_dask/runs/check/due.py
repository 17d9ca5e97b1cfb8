"""Says which rows and which lines of metrics a run ought to have, by what it recorded when it began
and as it went on.

A checkpoint is committed after all tables of the steps up to it, and a run is complete after all of
them. So the rows of these steps are there, unless they were deleted on purpose. Later ones may
never have been committed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from siirl_dask.errors import ConfigError, DataError
from siirl_dask.observe import Status, read_metrics, read_summary
from siirl_dask.planner import Phase
from siirl_dask.runs.checkpoints import committed
from siirl_dask.runs.identity_file import IdentityFile, read_identity_file, read_retention
from siirl_dask.tables import step_name

_RECORD = re.compile(r"([\w-]+)/step=(\d{6,})/_parts-\d{4,}\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class Due:
    """Rows and lines of metrics that ought to be there."""

    folders: frozenset[str] = frozenset()
    """Folders of rows, below the run's."""
    validations: frozenset[int] = frozenset()
    """Steps after which a validation was recorded: those whose rows are there."""


def find_due(url: str, files: Mapping[str, int]) -> Due:
    """Return what the run at ``url`` ought to have, given the sizes of its files by path.

    Nothing, where an earlier version began it, and where the small files that say so are damaged,
    which is a finding of its own.
    """
    try:
        identity = read_identity_file(url)
        removed = read_retention(url)
        complete = _complete_steps(url)
        measured = [(record["phase"], record["step"]) for record in read_metrics(url)]
    except (ConfigError, DataError, UnicodeDecodeError):
        return Due()
    if identity is None:
        return Due()
    last = max([complete, *committed(url)])
    folders = set()
    for table, due in identity.tables.items():
        match due.phase:
            case Phase.TRAIN:
                steps = [*range(due.since, last + 1)]
            case Phase.VALIDATION:
                steps = [
                    step
                    for phase, step in measured
                    if phase is Phase.VALIDATION and due.since <= step <= last
                ]
            case _:
                steps = [
                    step for phase, step in measured if phase is Phase.TEST and step == complete
                ]
        last_removed = removed.get(table, -1)
        for step in steps:
            if step > last_removed:
                folders.add(f"{table}/{step_name(step)}")
    return Due(frozenset(folders), _validations(identity, files, last))


def _complete_steps(url: str) -> int:
    """Return the steps of a run that is complete; 0 for another one."""
    try:
        summary = read_summary(url)
    except FileNotFoundError:
        return 0
    if summary.status is Status.COMPLETE:
        return summary.steps
    return 0


def _validations(identity: IdentityFile, files: Mapping[str, int], last: int) -> frozenset[int]:
    """Return the steps up to ``last`` of which rows of a validation are committed."""
    found = set()
    for path in files:
        matched = _RECORD.fullmatch(path)
        if matched:
            due = identity.tables.get(matched[1])
            if due is not None and due.phase is Phase.VALIDATION and int(matched[2]) <= last:
                found.add(int(matched[2]))
    return frozenset(found)
