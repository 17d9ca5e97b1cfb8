"""Chooses samples to read, by their rewards, lengths or ends, with the columns that people read."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from siirl_dask.errors import DataError
from siirl_dask.runs.samples.conversations import flattened, samples_of, spoken_columns
from siirl_dask.runs.samples.last_message import chat_column, with_last_messages
from siirl_dask.runs.samples.per_sample import RESPONSE_TOKENS, check, length, per_sample
from siirl_dask.runs.samples.rollouts import ATTEMPT, Rollouts
from siirl_dask.runs.samples.utterances import FAILED, Decode
from siirl_dask.schema import (
    ANSWER,
    DATA_PART,
    DATA_ROW,
    FINISH_REASON,
    PROMPT,
    PROMPT_NUMBER,
    PROMPT_TEXT,
    RESPONSE,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    SAMPLE_NUMBER,
    SAMPLING_SEED,
    SOURCE_NAME,
    WEIGHTS_VERSION,
    WORKER,
)

_SHOWN = (
    *(
        REWARD,
        REWARD_PARTS,
        FINISH_REASON,
        PROMPT_NUMBER,
        SAMPLE_NUMBER,
        SOURCE_NAME,
        DATA_PART,
        DATA_ROW,
    ),
    *(WORKER, WEIGHTS_VERSION, SAMPLING_SEED, ATTEMPT),
)


def worst(
    rollouts: Rollouts,
    count: int = 5,
    decode: Decode | None = None,
    *,
    full: bool = False,
) -> pa.Table:
    """Return the ``count`` samples with the lowest rewards, later steps first among equals; see
    ``best``.
    """
    return _chosen(
        rollouts,
        count,
        where="reward IS NOT NULL",
        order="reward",
        missing="has a reward",
        decode=decode,
        full=full,
    )


def best(
    rollouts: Rollouts,
    count: int = 5,
    decode: Decode | None = None,
    *,
    full: bool = False,
) -> pa.Table:
    """Return the ``count`` samples with the highest rewards, later steps first among equals.

    The columns are those that people read: step and row id, prompt, response and answer as text,
    reward and its parts, ``response_tokens``, and the row's lineage, as far as the run has them.
    Samples without a reward do not count. A prompt is the last message of its user, or with
    ``full`` all that the model saw. Where the run has columns of turns, ``conversation``
    tells who said what, of which ``decode`` makes the texts.
    """
    return _chosen(
        rollouts,
        count,
        where="reward IS NOT NULL",
        order="reward DESC",
        missing="has a reward",
        decode=decode,
        full=full,
    )


def longest(
    rollouts: Rollouts,
    count: int = 5,
    decode: Decode | None = None,
    *,
    full: bool = False,
) -> pa.Table:
    """Return the ``count`` samples with the most response tokens, an environment's among them;
    see ``best``.
    """
    return _chosen(
        rollouts,
        count,
        where="true",
        order=f"{RESPONSE_TOKENS} DESC",
        missing="has a response",
        decode=decode,
        full=full,
    )


def failed(
    rollouts: Rollouts,
    count: int = 5,
    decode: Decode | None = None,
    *,
    full: bool = False,
) -> pa.Table:
    """Return the newest ``count`` episodes in which a call of the environment failed, perhaps
    none; see ``best``.
    """
    check(rollouts, FINISH_REASON)
    return _chosen(
        rollouts,
        count,
        where=f"finish_reason = '{FAILED}'",
        order="step DESC",
        missing="",
        decode=decode,
        full=full,
    )


def _chosen(
    rollouts: Rollouts,
    count: int,
    *,
    where: str,
    order: str,
    missing: str,
    decode: Decode | None,
    full: bool,
) -> pa.Table:
    """Return samples to read. DataError where there is none that ``missing`` tells of, if it
    tells of any.
    """
    if count < 1:
        raise DataError(f"{count} samples: expected at least 1")
    check(rollouts, REWARD, ROW_ID)
    needed = {"reward": REWARD, "row_id": ROW_ID, "row_ids": ROW_ID}
    needed |= {"finish_reason": FINISH_REASON} if "finish_reason" in where else {}
    needed |= {RESPONSE_TOKENS: length(rollouts)} if RESPONSE_TOKENS in order else {}
    # first the numbers of all rows, then the texts of a few: these are in few files
    found = rollouts.table(
        f"SELECT step, row_ids FROM {per_sample(rollouts, **needed)} WHERE {where} "
        f"ORDER BY {order}, step DESC, row_id LIMIT {int(count)}"
    )
    if missing and not found.num_rows:
        raise DataError(f"no sample of the table {rollouts.name!r} {missing}")
    places = list(zip(*found.to_pydict().values(), strict=True))
    samples = _read_samples(rollouts, places, decode, full=full)
    if full:
        return samples
    return with_last_messages(samples)


def _read_samples(
    rollouts: Rollouts,
    places: Sequence[tuple[int, Sequence[int]]],
    decode: Decode | None,
    *,
    full: bool,
) -> pa.Table:
    """Return the samples whose rows are at these places, steps and ids, with the columns of
    ``best``.
    """
    chosen = ", ".join(map(str, flattened(places)))
    steps = sorted({step for step, _ in places})
    if not places:  # SQL takes no empty list: no sample has these numbers
        chosen = "(-1, -1, -1)"
        steps = [min(rollouts.files)]
    spoken = spoken_columns(rollouts)
    columns = [
        *texts(rollouts, full=full),
        f"{length(rollouts)} AS {RESPONSE_TOKENS}",
        *there(rollouts, _SHOWN),
        *spoken,
    ]
    rows = rollouts.table(
        f"SELECT chosen.number, step, row_id, {', '.join(columns)} FROM {rollouts.of_steps(steps)} "
        f"JOIN (VALUES {chosen}) AS chosen(number, step, row_id) USING (step, row_id) "
        "ORDER BY chosen.number, row_id"
    )
    numbers = rows["number"].to_pylist()
    rows = rows.drop_columns(["number"])
    if spoken:
        return samples_of(rows, numbers, decode)
    return rows


def texts(rollouts: Rollouts, *, full: bool = True) -> list[str]:
    """Return SQL for the columns ``prompt``, ``response`` and ``answer``, as text, of those that
    there are; without ``full`` a chat's prompt is the last message of its user.
    """
    named = {
        PROMPT: prompt(rollouts) if full else asked(rollouts),
        RESPONSE: one_of(rollouts, RESPONSE),
        ANSWER: one_of(rollouts, ANSWER),
    }
    return [f"{text(rollouts, column)} AS {name}" for name, column in named.items() if column]


def asked(rollouts: Rollouts) -> str:
    """Return SQL for the last message of the user where the dataset has it, else the prompt as the
    model saw it.
    """
    chat = chat_column(rollouts)
    if chat:
        return chat
    return prompt(rollouts)


def prompt(rollouts: Rollouts) -> str:
    """Return the column that has the prompt as the model saw it, or as the dataset does."""
    as_seen = one_of(rollouts, PROMPT_TEXT)
    if as_seen:
        return as_seen
    return one_of(rollouts, PROMPT)


def one_of(rollouts: Rollouts, name: str) -> str:
    """Return the name of a column, empty where the table lacks it."""
    if name in rollouts.schema.names:
        return name
    return ""


def text(rollouts: Rollouts, name: str) -> str:
    """Return SQL for a column as text. DataError for an empty name: the table has no prompts."""
    if not name:
        check(rollouts, PROMPT_TEXT)
    return f"CAST({name} AS VARCHAR)"


def there(rollouts: Rollouts, names: tuple[str, ...]) -> list[str]:
    """Return those of the columns that the table has."""
    return [name for name in names if name in rollouts.schema.names]
