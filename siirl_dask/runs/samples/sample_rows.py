"""Reads the newest samples of a run for those who look at it while it goes on: few rows, and
short texts of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import Any

from siirl_dask.runs.samples.conversations import flattened, spoken_columns
from siirl_dask.runs.samples.last_message import last_message
from siirl_dask.runs.samples.per_sample import per_sample
from siirl_dask.runs.samples.prompt_images import ORIGIN
from siirl_dask.runs.samples.rollouts import Rollouts, open_newest
from siirl_dask.runs.samples.selection import texts
from siirl_dask.runs.samples.utterances import WrittenSpan, spans_of
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    AGENT,
    EPISODE_ID,
    FINISH_REASON,
    GROUP_ID,
    OLD_LOGPROBS,
    PROMPT,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    REWARD_PARTS,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    TOKENS,
    TURNS,
    WEIGHTS_VERSION,
    WORKER,
)

_CELL = 300  # characters of a text in a table
_PROMPT_END = 4096  # characters in which the last message of the user is looked for
_WHOLE = 2**16  # characters of a text as a whole
_TOKENS = 8192  # tokens of a sample as a whole
_LISTS = (RESPONSE_IDS, ROLLOUT_LOGPROBS, OLD_LOGPROBS)
_PLAIN = (
    REWARD,
    REWARD_PARTS,
    ADVANTAGE,
    GROUP_ID,
    TOKENS,
    FINISH_REASON,
    WORKER,
    WEIGHTS_VERSION,
    AGENT,
)


class Choice(StrEnum):
    """Samples that are asked for."""

    NEWEST = "newest"
    BEST = "best"
    WORST = "worst"
    EQUAL = "groups of equal rewards"
    """Groups whose rewards are all the same: they have no advantage, and teach nothing."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sample as far as a table shows it: a row, or the rows of an episode."""

    step: int
    row_id: int
    """Id of its first row."""
    prompt: str
    """The last message of its user in a table; all that the model saw in a whole sample."""
    response: str
    answer: str
    reward: float | None
    parts: Mapping[str, float]
    advantage: float | None
    group_id: int | None
    tokens: int | None
    finish_reason: str
    worker: str
    turns: int | None = None
    """Turns of the policy; None where the run does not tell them."""
    agent: str = ""


@dataclass(frozen=True, slots=True)
class WholeSample:
    """A sample with its tokens, as far as they are stored."""

    row: SampleRow
    token_ids: Sequence[int] = ()
    sampled: Sequence[float] = ()
    """Log-probability of each response token when it was drawn."""
    trained: Sequence[float] = ()
    """Its log-probability under the policy that learns, before the update."""
    spans: Sequence[WrittenSpan] = ()
    """Who wrote which of the tokens, where the run tells it."""
    begins: Sequence[int] = ()
    """Tokens at which a later row of an episode begins: its history was rewritten there."""
    weights_version: int | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where its prompt is from, by the columns ``prompt_images.ORIGIN`` that are there."""
    cut: bool = field(default=False)
    """Whether some of it was too long to be read."""


def newest_samples(
    url: str,
    steps: Sequence[int],
    choice: Choice,
    most: int = 100,
) -> list[SampleRow]:
    """Return at most ``most`` samples of those of the steps that are whole, the newest first or as
    ``choice`` says.

    DataError for a store that cannot be read and for damaged parts; no rows where no step is whole
    yet.
    """
    with open_newest(url, steps) as rollouts:
        if rollouts is None:
            return []
        places = _places(rollouts, choice, most)
        if not places:
            return []
        turns = []
        if TURNS in rollouts.schema.names:
            turns = [f"len({TURNS}) AS {TURNS}"]
        read = _rows(rollouts, places, _CELL, turns, full=False)
        return [_in_a_cell(_sample(rows)) for rows in read]


def whole_sample(url: str, step: int, row_id: int) -> WholeSample | None:
    """Return a sample with its tokens, one of whose rows is ``row_id``; None if it is not there.

    DataError as for ``newest_samples``.
    """
    with open_newest(url, [step]) as rollouts:
        if rollouts is None:
            return None
        found = rollouts.table(
            f"SELECT row_ids FROM {per_sample(rollouts, row_ids=ROW_ID)} WHERE "
            f"list_contains(row_ids, {int(row_id)})"
        )
        if not found.num_rows:
            return None
        there = rollouts.schema.names
        lists = [name for name in (*_LISTS, RESPONSE_MASK) if name in there]
        more = [f"{name}[1:{_TOKENS + 1}] AS {name}" for name in lists]
        if TURNS in there:
            more.append(TURNS)
        more += [name for name in ORIGIN if name in there]
        place = (step, found["row_ids"][0].as_py())
        (rows,) = _rows(rollouts, [place], _WHOLE, more, full=True)
        spoken = bool(spoken_columns(rollouts))
    with_turn_counts = []
    for row in rows:
        counts = {}
        if TURNS in row:
            counts = {TURNS: len(row[TURNS] or ())}
        with_turn_counts.append({**row, **counts})
    sample = _sample(with_turn_counts)
    ids, sampled, trained = (_values_of(rows, name) for name in _LISTS)
    spans, begins = _spans(rows) if spoken else ((), ())
    longest = max(map(len, (sample.prompt, sample.response, sample.answer)))
    is_cut = len(ids) > _TOKENS
    if longest >= _WHOLE:
        is_cut = True
    return WholeSample(
        row=sample,
        token_ids=ids[:_TOKENS],
        sampled=sampled[:_TOKENS],
        trained=trained[:_TOKENS],
        spans=spans,
        begins=begins,
        weights_version=rows[-1].get(WEIGHTS_VERSION),
        origin={name: rows[0][name] for name in ORIGIN if name in rows[0]},
        cut=is_cut,
    )


def _values_of(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the values of a column of lists, row after row."""
    values: list[Any] = []
    for row in rows:
        values.extend(row.get(name) or ())
    return values


def _spans(rows: Sequence[Mapping[str, Any]]) -> tuple[list[WrittenSpan], list[int]]:
    """Return who wrote which of the rows' tokens, laid end to end, and where rows but the first
    begin.
    """
    spans: list[WrittenSpan] = []
    begins: list[int] = []
    at = 0
    for row in rows:
        begins.append(at)
        count = len(row.get(RESPONSE_IDS) or ())
        for span in spans_of(count, row.get(RESPONSE_MASK), row.get(TURNS)):
            start, stop = (min(_TOKENS, at + place) for place in (span.start, span.stop))
            spans += [WrittenSpan(start, stop, span.own, span.reward)] if start < stop else []
        at += count
    return spans, [begin for begin in begins[1:] if begin < _TOKENS]


def _places(rollouts: Rollouts, choice: Choice, most: int) -> list[tuple[int, list[int]]]:
    """Return step and row ids of the samples; their rewards are read for that, and no texts."""
    names = rollouts.schema.names
    scored = REWARD in names
    needed = {"row_id": ROW_ID, "row_ids": ROW_ID} | ({"reward": REWARD} if scored else {})
    if choice is Choice.EQUAL:
        if not scored or GROUP_ID not in names:
            return []
        agent = {}
        if {EPISODE_ID, AGENT} <= {*names}:
            agent = {AGENT: AGENT}
        group = ", ".join(["step", GROUP_ID, *agent])
        source = (
            f"(SELECT * FROM {per_sample(rollouts, **needed, group_id=GROUP_ID, **agent)} WINDOW "
            f"grouped AS (PARTITION BY {group}) QUALIFY count(reward) OVER grouped > 1 AND "
            "min(reward) OVER grouped = max(reward) OVER grouped)"
        )
        order = "step DESC, group_id, row_id"
    else:
        source = per_sample(rollouts, **needed)
        source += " WHERE reward IS NOT NULL" if choice is not Choice.NEWEST and scored else ""
        by = ""
        if scored:
            by = {Choice.BEST: "reward DESC, ", Choice.WORST: "reward, "}.get(choice, "")
        order = f"{by}step DESC, {ROW_ID}"
    found = rollouts.table(f"SELECT step, row_ids FROM {source} ORDER BY {order} LIMIT {int(most)}")
    return list(zip(*found.to_pydict().values(), strict=True))


def _rows(
    rollouts: Rollouts,
    places: Sequence[tuple[int, Sequence[int]]],
    characters: int,
    more: Sequence[str] = (),
    *,
    full: bool,
) -> list[list[dict[str, Any]]]:
    """Return the rows of each sample that are there, in the order of their ids.

    Without ``full`` a prompt is the last message of its user, or its end.
    """
    there = rollouts.schema.names
    cut = []
    for text in texts(rollouts, full=full):
        value, _, name = text.rpartition(" AS ")
        if name == PROMPT and not full:  # what is asked comes last
            cut.append(f"right({value}, {_PROMPT_END}) AS {name}")
        else:
            cut.append(f"left({value}, {characters}) AS {name}")
    plain = [name for name in _PLAIN if name in there]
    if ADVANTAGE not in there and ADVANTAGES in there:
        plain.append(f"list_avg({ADVANTAGES}) AS {ADVANTAGE}")
    chosen = ", ".join(map(str, flattened(places)))
    steps = sorted({step for step, _ in places})
    rows = rollouts.table(
        f"SELECT number, step, row_id, {', '.join([*cut, *plain, *more])} FROM "
        f"{rollouts.of_steps(steps)} JOIN (VALUES {chosen}) AS chosen(number, step, row_id) USING "
        "(step, row_id) ORDER BY number, row_id"
    ).to_pylist()
    return [list(own) for _, own in groupby(rows, key=itemgetter("number"))]


def _sample(rows: Sequence[Mapping[str, Any]]) -> SampleRow:
    first = rows[0]
    last = rows[-1]
    parts = last.get(REWARD_PARTS)
    if parts is None:
        parts = ()
    return SampleRow(
        step=int(first["step"]),
        row_id=int(first[ROW_ID]),
        prompt=first.get("prompt") or "",
        response=last.get("response") or "",
        answer=last.get("answer") or "",
        reward=_sum(rows, REWARD),
        parts=dict(parts),
        advantage=last.get(ADVANTAGE),
        group_id=last.get(GROUP_ID),
        tokens=_sum(rows, TOKENS),
        finish_reason=last.get(FINISH_REASON) or "",
        worker=last.get(WORKER) or "",
        turns=_sum(rows, TURNS),
        agent=last.get(AGENT) or "",
    )


def _in_a_cell(row: SampleRow) -> SampleRow:
    return replace(row, prompt=last_message(row.prompt)[:_CELL])


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return the sum of a column; None where a row has none."""
    values = [row.get(name) for row in rows]
    if None in values:
        return None
    if len(values) == 1:
        return values[0]
    return sum(values)
