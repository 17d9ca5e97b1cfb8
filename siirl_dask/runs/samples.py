"""Reads the newest samples of a run for those who look at it while it goes on: few rows, and short texts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from siirl_dask.runs.questions import texts
from siirl_dask.runs.rollouts import Rollouts, open_newest
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    FINISH_REASON,
    GROUP_ID,
    OLD_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    REWARD_PARTS,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    TOKENS,
    WEIGHTS_VERSION,
    WORKER,
)

_CELL = 300  # characters of a text in a table
_WHOLE = 2**16  # characters of a text as a whole
_TOKENS = 8192  # tokens of a sample as a whole


class Choice(StrEnum):
    """Samples that are asked for."""

    NEWEST = "newest"
    BEST = "best"
    WORST = "worst"
    EQUAL = "groups of equal rewards"
    """Groups whose rewards are all the same: they have no advantage, and teach nothing."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sample as far as a table shows it."""

    step: int
    row_id: int
    prompt: str
    """As the model saw it; its first characters, like the response's and the answer's."""
    response: str
    answer: str
    reward: float | None
    parts: Mapping[str, float]
    advantage: float | None
    group_id: int | None
    tokens: int | None
    finish_reason: str
    worker: str


@dataclass(frozen=True, slots=True)
class WholeSample:
    """A sample with its tokens, as far as they are stored."""

    row: SampleRow
    token_ids: Sequence[int] = ()
    sampled: Sequence[float] = ()
    """Log-probability of each response token when it was drawn."""
    trained: Sequence[float] = ()
    """Its log-probability under the policy that learns, before the update."""
    weights_version: int | None = None
    cut: bool = field(default=False)
    """Whether some of it was too long to be read."""


def newest_samples(url: str, steps: Sequence[int], choice: Choice, most: int = 100) -> list[SampleRow]:
    """Return at most ``most`` samples of those of the steps that are whole, the newest first or as ``choice`` says.

    DataError for a store that cannot be read and for damaged parts; no rows where no step is whole yet.
    """
    with open_newest(url, steps) as rollouts:
        if rollouts is None:
            return []
        places = _places(rollouts, choice, most)
        if not places:
            return []
        rows = _rows(rollouts, places, _CELL)
    return [_sample(row) for row in rows]


def whole_sample(url: str, step: int, row_id: int) -> WholeSample | None:
    """Return a sample with its tokens; None if it is not there. DataError as for ``newest_samples``."""
    with open_newest(url, [step]) as rollouts:
        if rollouts is None:
            return None
        lists = [name for name in (RESPONSE_IDS, ROLLOUT_LOGPROBS, OLD_LOGPROBS) if name in rollouts.schema.names]
        rows = _rows(rollouts, [(step, row_id)], _WHOLE, [f"{name}[1:{_TOKENS + 1}] AS {name}" for name in lists])
    if not rows:
        return None
    row, sample = rows[0], _sample(rows[0])
    found = [list(row.get(name) or ()) for name in (RESPONSE_IDS, ROLLOUT_LOGPROBS, OLD_LOGPROBS)]
    ids, sampled, trained = (one[:_TOKENS] for one in found)
    cut = len(found[0]) > _TOKENS or max(map(len, (sample.prompt, sample.response, sample.answer))) >= _WHOLE
    return WholeSample(sample, ids, sampled, trained, row.get(WEIGHTS_VERSION), cut)


def _places(rollouts: Rollouts, choice: Choice, most: int) -> list[tuple[int, int]]:
    """Return step and row id of the samples; their rewards are read for that, and no texts."""
    names = rollouts.schema.names
    scored = REWARD in names
    if choice is Choice.EQUAL:
        if not scored or GROUP_ID not in names:
            return []
        source = (
            f"(SELECT step, row_id, group_id FROM {rollouts.view} WINDOW grouped AS (PARTITION BY step, group_id) "
            "QUALIFY count(reward) OVER grouped > 1 AND min(reward) OVER grouped = max(reward) OVER grouped)"
        )
        order = "step DESC, group_id, row_id"
    else:
        source = rollouts.view + (" WHERE reward IS NOT NULL" if choice is not Choice.NEWEST and scored else "")
        by = {Choice.BEST: "reward DESC, ", Choice.WORST: "reward, "}.get(choice, "") if scored else ""
        order = f"{by}step DESC, {ROW_ID}"
    found = rollouts.table(f"SELECT step, {ROW_ID} FROM {source} ORDER BY {order} LIMIT {int(most)}")
    return list(zip(*found.to_pydict().values(), strict=True))


def _rows(
    rollouts: Rollouts, places: Sequence[tuple[int, int]], characters: int, more: Sequence[str] = ()
) -> list[dict[str, Any]]:
    there = rollouts.schema.names
    cut = [
        f"left({text.rpartition(' AS ')[0]}, {characters}) AS {text.rpartition(' AS ')[2]}" for text in texts(rollouts)
    ]
    plain = [
        name
        for name in (REWARD, REWARD_PARTS, ADVANTAGE, GROUP_ID, TOKENS, FINISH_REASON, WORKER, WEIGHTS_VERSION)
        if name in there
    ]
    if ADVANTAGE not in there and ADVANTAGES in there:
        plain.append(f"list_avg({ADVANTAGES}) AS {ADVANTAGE}")
    chosen = ", ".join(f"({number}, {int(step)}, {int(row)})" for number, (step, row) in enumerate(places))
    steps = sorted({step for step, _ in places})
    rows: list[dict[str, Any]] = rollouts.table(
        f"SELECT step, row_id, {', '.join([*cut, *plain, *more])} FROM {rollouts.of_steps(steps)} "
        f"JOIN (VALUES {chosen}) AS chosen(number, step, row_id) USING (step, row_id) ORDER BY chosen.number"
    ).to_pylist()
    return rows


def _sample(row: Mapping[str, Any]) -> SampleRow:
    parts = row.get(REWARD_PARTS) or ()
    return SampleRow(
        step=int(row["step"]),
        row_id=int(row[ROW_ID]),
        prompt=row.get("prompt") or "",
        response=row.get("response") or "",
        answer=row.get("answer") or "",
        reward=row.get(REWARD),
        parts=dict(parts),
        advantage=row.get(ADVANTAGE),
        group_id=row.get(GROUP_ID),
        tokens=row.get(TOKENS),
        finish_reason=row.get(FINISH_REASON) or "",
        worker=row.get(WORKER) or "",
    )
