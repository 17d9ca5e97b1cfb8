"""Previews the samples of a run that may be far away: a few rows of one part of one step,
and no other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siirl_storage import (
    StorageError,
    TooLarge,
    list_files,
    newest_parts,
    open_fs,
    read_footer,
    read_rows,
)
from siirl_storage.files import at

from siirl_dask.errors import DataError
from siirl_dask.runs.samples.last_message import is_chat, last_message
from siirl_dask.runs.samples.rollouts import TABLE
from siirl_dask.schema import FINISH_REASON, PROMPT, PROMPT_TEXT, RESPONSE, REWARD, TURNS
from siirl_dask.tables import step_folder

_MOST_BYTES = 2**24  # of the columns of a row group


def preview_samples(url: str, step: int, count: int) -> list[Mapping[str, Any]]:
    """Return up to ``count`` rows of a step, each with ``prompt``, the last message of its user,
    ``response`` and ``reward``, from best to worst.

    Where the run has turns, ``turns`` is their number, and ``finish_reason`` tells of episodes that
    failed. They are evenly apart in the first row group of the first part. None come of a step that
    is not saved, or whose texts are too large for a preview. DataError for a damaged part.
    """
    try:
        fs, root = open_fs(step_folder(url, TABLE, step))
        parts = [name for name in newest_parts(list_files(fs, root)) if name.endswith(".parquet")]
        if not parts:
            return []
        path = at(root, parts[0])
        footer = read_footer(fs, path)
        names = footer.schema.names
        prompt = PROMPT
        if PROMPT_TEXT in names:
            prompt = PROMPT_TEXT
        if PROMPT in names and is_chat(footer.schema.field(PROMPT).type):
            prompt = PROMPT
        if not footer.groups or not {prompt, RESPONSE, REWARD} <= {*names}:
            return []
        rows = footer.groups[0]
        chosen = []
        if rows:
            chosen = sorted({rows * number // count for number in range(count)})
        columns = [
            prompt,
            RESPONSE,
            REWARD,
            *(name for name in (TURNS, FINISH_REASON) if {TURNS, name} <= {*names}),
        ]
        table = read_rows(fs, path, 0, columns, footer.groups, rows=chosen, max_bytes=_MOST_BYTES)
    except TooLarge:
        return []
    except (StorageError, FileNotFoundError) as error:
        raise DataError(f"the samples of step {step} cannot be read: {error}") from error
    found = table.rename_columns([PROMPT, *columns[1:]]).to_pylist()
    for row in found:
        row[PROMPT] = last_message(row[PROMPT])
        if TURNS in row:
            row[TURNS] = len(row[TURNS] or ())
    scored = [row for row in found if row[REWARD] is not None]
    scored.sort(key=lambda row: -row[REWARD])
    return [*scored, *(row for row in found if row[REWARD] is None)]
