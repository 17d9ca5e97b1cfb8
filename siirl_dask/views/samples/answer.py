"""An answer to a question about a run's samples, and how its values are written: the same in a
terminal and on a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import pyarrow as pa

from siirl_dask.errors import counted
from siirl_dask.observe import printable
from siirl_dask.runs.samples.conversations import CONVERSATION
from siirl_dask.runs.samples.mismatch import RATIO_BINS
from siirl_dask.runs.samples.utterances import FAILED, UtteranceKind

_ENDS = {
    "length": "cut at the limit",
    "turns": "no turn left",
    "environment": "ended by the environment",
    FAILED: "failed",
}
_SHARES = {"share", "truncated", *RATIO_BINS}


class AnswerLayout(Enum):
    """The ways in which an answer is laid out."""

    TABLE = auto()
    HISTOGRAM = auto()
    SAMPLES = auto()
    CHANGES = auto()


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The answer to one question."""

    title: str
    table: pa.Table
    layout: AnswerLayout = AnswerLayout.TABLE
    note: str = ""


def cell(name: str, value: object) -> str:
    """Return a value of the column ``name`` as text without line breaks; shares in percent."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if name in _SHARES:
            return f"{value:.1%}"
        if value.is_integer():
            return f"{value:,.0f}"
        if abs(value) >= 1:
            return f"{value:,.2f}"
        return f"{value:.4g}"
    return " ".join(printable(str(value)).split())


def headings(sample: Mapping[str, Any]) -> str:
    """Return step, reward, length and end of a sample, in one line."""
    reason = sample.get("finish_reason")
    parts = [f"step {sample['step']}", f"reward {cell('reward', sample['reward'])}"]
    if sample.get("agent"):
        parts.append(f"agent {printable(str(sample['agent']))}")
    if sample.get("turns"):
        parts.append(counted(sample["turns"], "turn"))
    if (sample.get("segments") or 1) > 1:
        parts.append(counted(sample["segments"], "segment"))
    if sample.get("response_tokens") is not None:
        parts.append(counted(sample["response_tokens"], "token"))
    if reason in _ENDS:
        parts.append(_ENDS[reason])
    return ", ".join(parts)


def conversation(sample: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the utterances of a sample of several turns: kind, who, text, turn, reward. Of
    other samples there are none.
    """
    utterances: Sequence[Mapping[str, Any]] | None = sample.get(CONVERSATION)
    if not utterances:
        return ()
    return utterances


def speaker(utterance: Mapping[str, Any]) -> str:
    """Return who speaks, in which turn, and the turn's reward: ``policy calls a tool, turn 2,
    reward 0.5``.
    """
    who = printable(str(utterance["who"]))
    if utterance["kind"] == UtteranceKind.CALL:
        who += " calls a tool"
    parts = [who]
    if utterance["turn"] is not None:
        parts.append(f"turn {utterance['turn']}")
    if utterance["reward"] is not None:
        parts.append(f"reward {cell('reward', utterance['reward'])}")
    return ", ".join(parts)


def reward_parts(sample: Mapping[str, Any]) -> str:
    """Return the parts of a sample's reward, such as ``format 1, correct 0``."""
    parts = sample.get("reward_parts")
    if not parts:
        return ""
    return ", ".join(f"{printable(str(name))} {cell('', value)}" for name, value in parts)


def lineage(sample: Mapping[str, Any]) -> str:
    """Return where a sample comes from, as far as its run has recorded it."""
    columns = {
        "row": "row_id",
        "episode": "episode_id",
        "prompt": "prompt_number",
        "dataset": "source_name",
        "dataset part": "data_part",
        "dataset row": "data_row",
        "sample": "sample_number",
        "worker": "worker",
        "weights": "weights_version",
        "seed": "sampling_seed",
        "attempt": "attempt",
    }
    there = {text: sample[name] for text, name in columns.items() if sample.get(name) is not None}
    return ", ".join(f"{text} {printable(str(value))}" for text, value in there.items())


def summary(changes: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of prompts that two steps share, and what became of their rewards."""
    count = len(changes)
    then = sum(row["then"] for row in changes) / count
    now = sum(row["now"] for row in changes) / count
    rose = sum(row["change"] > 0 for row in changes)
    fell = sum(row["change"] < 0 for row in changes)
    prompts = "1 prompt is"
    if count != 1:
        prompts = f"{count} prompts are"
    return (
        f"{prompts} in both, with a mean reward of {then:.4f} then and {now:.4f} now: "
        f"{rose} rose, {fell} fell, {count - rose - fell} stayed."
    )
