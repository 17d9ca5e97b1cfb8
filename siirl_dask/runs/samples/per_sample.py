"""SQL that counts samples: a row each, but of an episode of several rows one, of each of its
agents.
"""

from __future__ import annotations

from siirl_dask.errors import DataError
from siirl_dask.runs.samples.rollouts import Rollouts
from siirl_dask.schema import (
    AGENT,
    EPISODE_ID,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    ROW_ID,
    TOKENS,
    TURNS,
)

RESPONSE_TOKENS = "response_tokens"
ROW_IDS = "row_ids"
"""Column with the ids of a sample's rows, ascending."""
_SUMMED = (RESPONSE_TOKENS, TURNS, TOKENS)


def per_sample(rollouts: Rollouts, source: str = "", **columns: str) -> str:
    """Return a table expression with ``step`` and ``columns``, given as SQL by their names, of each
    sample.

    Of an episode's rows rewards are added up, and are null where one is; ``row_id`` is the first,
    ``row_ids`` are all; any other column is the last row's. ``source`` is a table expression, by
    default all rows.
    """
    if not source:
        source = rollouts.view
    if EPISODE_ID not in rollouts.schema.names:
        given = {**columns, **({ROW_IDS: f"[{ROW_ID}]"} if ROW_IDS in columns else {})}
        return (
            f"(SELECT {', '.join(['step', *(f'{sql} AS {name}' for name, sql in given.items())])} "
            f"FROM {source})"
        )
    merged = ", ".join(
        ["step", *(f"{_merged(name, sql)} AS {name}" for name, sql in columns.items())]
    )
    key = ", ".join(["step", EPISODE_ID, *([AGENT] if AGENT in rollouts.schema.names else [])])
    return f"(SELECT {merged} FROM {source} GROUP BY {key})"


def _merged(name: str, sql: str) -> str:
    if name == REWARD:
        return f"CASE WHEN count({sql}) = count(*) THEN sum({sql}) END"
    if name == ROW_IDS:
        return f"list({ROW_ID} ORDER BY {ROW_ID})"
    if name == ROW_ID:
        return f"min({sql})"
    if name in _SUMMED:
        return f"sum({sql})"
    return f"arg_max({sql}, {ROW_ID})"


def length(rollouts: Rollouts) -> str:
    """Return SQL for a response's tokens. All tokens less the prompt's cost a tenth of counting
    the response's ids.
    """
    there = rollouts.schema.names
    if TOKENS in there and PROMPT_IDS in there:
        return "(tokens - len(prompt_ids))"
    check(rollouts, RESPONSE_IDS)
    return "len(response_ids)"


def check(rollouts: Rollouts, *names: str) -> None:
    """Raise DataError for a column that the saved table lacks."""
    missing = [name for name in names if name not in rollouts.schema.names]
    if missing:
        raise DataError(
            f"the table {rollouts.name!r} has no column {missing[0]!r}: no node of the run's DAG "
            f"wrote it before the table was saved (it has: {', '.join(rollouts.schema.names)})"
        )
