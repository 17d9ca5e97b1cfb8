"""Makes samples of rows: of an episode with several, one; and tells what was said in those of
several turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.runs.samples.per_sample import RESPONSE_TOKENS
from siirl_dask.runs.samples.rollouts import Rollouts
from siirl_dask.runs.samples.utterances import Decode, utterances
from siirl_dask.schema import (
    AGENT,
    EPISODE_ID,
    FINISH_REASON,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    ROW_ID,
    SEGMENT,
    TURNS,
)

CONVERSATION = "conversation"
"""Column of a table of samples: what was said, a list of utterances; null where a response is
one turn."""
SEGMENTS = "segments"
_UTTERANCE = pa.struct(
    {
        "who": pa.string(),
        "kind": pa.string(),
        "text": pa.string(),
        "turn": pa.int32(),
        "reward": pa.float64(),
    }
)
_KEPT = (AGENT, EPISODE_ID)
_SPOKEN = (PROMPT_IDS, RESPONSE_IDS, RESPONSE_MASK, TURNS, AGENT, SEGMENT, EPISODE_ID)


def spoken_columns(rollouts: Rollouts) -> list[str]:
    """Return the columns that tell who said what; none in a table whose responses are all of the
    policy.
    """
    there = rollouts.schema.names
    if not {RESPONSE_MASK, TURNS, EPISODE_ID} & {*there}:
        return []
    return [name for name in _SPOKEN if name in there]


def samples_of(rows: pa.Table, numbers: Sequence[int], decode: Decode | None) -> pa.Table:
    """Return the samples of the rows, which lie sample after sample; ``numbers`` tell whose each
    row is.

    A sample has its last row's columns, but the first one's prompt and id, and the sum of rewards
    and of tokens. Those that tell who said what become ``conversation``, ``turns`` and
    ``segments``, the numbers of both.
    """
    number = np.asarray(numbers)
    is_first = np.ones(len(number), np.bool_)
    is_first[1:] = number[1:] != number[:-1]
    begins = np.flatnonzero(is_first)
    ends = begins
    if len(number):
        ends = np.concatenate([begins[1:], [len(number)]])
    samples = rows.drop_columns(
        [name for name in _SPOKEN if name in rows.column_names and name not in _KEPT]
    )
    samples = samples.take(ends - 1)
    for name in (PROMPT, ROW_ID):
        if name in samples.column_names:
            samples = _set(samples, name, rows[name].take(begins))
    for name in (REWARD, RESPONSE_TOKENS):
        if name in samples.column_names:
            parts = [
                rows[name].slice(begin, end - begin)
                for begin, end in zip(begins, ends, strict=True)
            ]
            samples = _set(samples, name, pa.array([_sum(one) for one in parts], rows[name].type))
    spoken = [
        name for name in (*_SPOKEN, RESPONSE, REWARD, FINISH_REASON) if name in rows.column_names
    ]
    table = rows.select(spoken)
    of_each = [
        table.slice(begin, end - begin).to_pylist() for begin, end in zip(begins, ends, strict=True)
    ]
    turns = [_turns(own) for own in of_each]
    samples = samples.append_column(TURNS, pa.array(turns, pa.int32()))
    samples = samples.append_column(SEGMENTS, pa.array(ends - begins, pa.int32()))
    conversations = [_told(own, decode) for own in of_each]
    return samples.append_column(CONVERSATION, pa.array(conversations, pa.list_(_UTTERANCE)))


def _told(rows: Sequence[Mapping[str, Any]], decode: Decode | None) -> list[dict[str, Any]] | None:
    found = utterances(rows, decode)
    if len(found) < 2 and not rows[0].get(TURNS):
        return None
    return [
        {name: getattr(one, name) for name in ("who", "kind", "text", "turn", "reward")}
        for one in found
    ]


def _turns(rows: Sequence[Mapping[str, Any]]) -> int | None:
    if TURNS not in rows[0]:
        return None
    return sum(len(row[TURNS] or ()) for row in rows)


def _sum(numbers: pa.ChunkedArray) -> Any:
    if numbers.null_count:
        return None
    return pc.sum(numbers).as_py()


def _set(table: pa.Table, name: str, column: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def flattened(places: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int, int]]:
    """Yield number, step and row id of each row of samples, which are given by their steps and
    their rows' ids.
    """
    for number, (step, row_ids) in enumerate(places):
        for row_id in row_ids:
            yield number, int(step), int(row_id)
