"""The tables of rows that a run saves: ``<run.url>/rollouts/step=000007/``. A step counts when its
record is there.

The workers write parts that carry the number of their attempt, and the driver commits them when all
are written, also while the step goes on: see stages.py and siirl_storage/committed.py. Processes of
an attempt that was fenced may still write parts, which no record lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsspec import AbstractFileSystem
from siirl_storage import Part, commit_parts, join, open_fs, remove_file, remove_tree

from siirl_dask.planner import DAG, TRACE
from siirl_dask.runs.attempt import Attempt
from siirl_dask.tables import step_folder, step_of

_TEST = "test"  # the table of the test phase
REPLAY = re.compile(r"replay-(\d+)", re.ASCII)
"""Names of the tables that ``siirl-dask replay`` makes."""


def tables_of(dags: Iterable[DAG | None]) -> set[str]:
    """Return the tables that a run stores, by their folders: those of its nodes, of the test
    phase, and the trace.
    """
    tables: list[str | None] = []
    for dag in dags:
        if dag:
            for node in dag.nodes:
                tables += [node.stored_as, node.state_table]
    return {_TEST, TRACE, *filter(None, tables)}


def commit_table(
    attempt: Attempt,
    table: str,
    step: int,
    parts: Sequence[Part],
    about: Mapping[str, Any],
) -> None:
    """Commit the parts of a table at ``step``, with what ``describe_stage`` says of them.

    Fenced if another start has taken the run over.
    """
    attempt.check()
    ordered = sorted(parts, key=lambda part: part.path)
    commit_parts(step_folder(attempt.url, table, step), attempt.number, ordered, about)


def remove_step(attempt: Attempt, table: str, step: int) -> None:
    """Delete the rows of a table at ``step``, if there are any, once a table that takes their place
    is committed.

    Records go first: what is left after a crash does not look whole. Fenced if another start has
    taken the run over; one that does so after this has looked finds the other table.
    """
    attempt.check()
    fs, folder = open_fs(step_folder(attempt.url, table, step))
    for path in listed(fs, folder):
        if path.endswith(".json"):
            remove_file(fs, path)
    remove_tree(fs, folder)


def stored_steps(url: str, table: str) -> set[int]:
    """Return the steps of which the run at ``url`` has rows in ``table``, whole or not."""
    fs, root = open_fs(join(url, table))
    steps = set()
    for path in listed(fs, root):
        _, _, name = path.rpartition("/")
        step = step_of(name)
        if step is not None:
            steps.add(step)
    return steps


def remove_steps(url: str, tables: Iterable[str], done: int) -> None:
    """Delete the saved rows of steps after step ``done`` and of the test; with ``done=0``, of all
    steps.

    These steps are done anew, perhaps by other workers, and parts of both must not lie side by
    side. Only an attempt that has the folder may do that: there is nobody else then who counts on
    them.
    """
    for table in tables:
        fs, root = open_fs(join(url, table))
        for path in listed(fs, root):
            step = step_of(path.rpartition("/")[2])
            if step is not None and (step > done or not done or table == _TEST):
                remove_tree(fs, path)


def listed(fs: AbstractFileSystem, folder: str) -> list[str]:
    """Return the paths in ``folder``; none if there is no such folder."""
    try:
        return [str(path).rstrip("/") for path in fs.ls(folder, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
