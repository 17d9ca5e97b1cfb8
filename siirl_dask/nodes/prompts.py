"""Turns the dataset's prompts into token ids, drops prompts that are too long, and estimates what each one costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Reduce
from siirl_dask.coordinator.layout.balance import Ints
from siirl_dask.errors import DataError
from siirl_dask.planner import Changes, columns
from siirl_dask.rollout import RolloutEngine
from siirl_dask.schema import PROMPT, PROMPT_IDS, PROMPT_TEXT, ROW_ID, TOKENS, TYPES, fields

MAX_TOKENS = "max_tokens"
"""An optional column of the dataset: the row's own limit of response tokens, below ``rollout.max_response_length``."""
_READ_FOR_ONE = 16
"""Prompt tokens that are read in the time of sampling one: they are read together, and once for n samples."""


def reads_expected_length(*, rollout: RolloutConfig | None = None, **options: object) -> Changes:
    """Declare, for ``depends_on_options``, that ``rollout.expected_length_column`` is read where a dataset has it."""
    column = None if rollout is None else rollout.expected_length_column
    return Changes(optional=() if column is None else (column,))


@columns(
    reads=[PROMPT],
    optional=[MAX_TOKENS],
    depends_on_options=reads_expected_length,
    writes=fields(PROMPT_IDS, PROMPT_TEXT),
    new_rows=True,
)
def encode_prompts(
    ctx: Context, table: pa.Table, *, max_prompt_length: int, rollout: RolloutConfig | None = None
) -> pa.Table:
    """Add each prompt's token ids, and as its size what sampling from it costs (``sampling_costs``).

    A prompt of more than ``max_prompt_length`` tokens is dropped from its step and counted; the rule looks at the
    prompt alone, so it drops the same rows on any number of workers. A worker may be left without rows; a step that
    leaves no worker any trains nothing (``driver/prompts.py`` warns of it). ValueError for a prompt without tokens.
    """
    engine: RolloutEngine = ctx.resource
    ids = [engine.tokenizer.encode(prompt) for prompt in table[PROMPT].to_pylist()]
    for row_id, tokens in zip(table[ROW_ID].to_pylist(), ids, strict=True):
        if not tokens:
            raise ValueError(f"the prompt of row {row_id} has no tokens: the model needs at least one to go on from")
    dropped = [len(tokens) for tokens in ids if len(tokens) > max_prompt_length]
    ctx.log("data/prompts", len(ids) - len(dropped), Reduce.SUM)
    ctx.log("data/dropped_prompts", len(dropped), Reduce.SUM)
    if dropped:
        ctx.log("data/shortest_dropped_prompt", min(dropped), Reduce.MIN)
        table = table.filter(pa.array([len(tokens) <= max_prompt_length for tokens in ids]))
        ids = [tokens for tokens in ids if len(tokens) <= max_prompt_length]
    texts = [engine.tokenizer.decode(tokens, skip_special=False) for tokens in ids]
    costs = sampling_costs(table, [*map(len, ids)], rollout)
    table = table.set_column(table.column_names.index(TOKENS), TOKENS, pa.array(costs, pa.int64()))
    table = table.append_column(PROMPT_IDS, pa.array(ids, TYPES[PROMPT_IDS]))
    return table.append_column(PROMPT_TEXT, pa.array(texts, TYPES[PROMPT_TEXT]))


def limits_of(rows: pa.Table) -> list[int | None]:
    """Return each row's own limit of response tokens, None where it has none. DataError for other values."""
    if MAX_TOKENS not in rows.column_names:
        return [None] * int(rows.num_rows)
    limits: list[object] = rows[MAX_TOKENS].to_pylist()
    for row_id, limit in zip(rows[ROW_ID].to_pylist(), limits, strict=True):
        if limit is not None and not (isinstance(limit, int) and limit >= 1):
            raise DataError(f"row {row_id} has {MAX_TOKENS}={limit!r}: expected a whole number of at least 1, or null")
    return limits  # type: ignore[return-value]  # checked above


def check_expected(lengths: pa.ChunkedArray, column: str, first: int = 0) -> None:
    """Raise DataError for expected lengths that are no whole numbers of at least 1.

    Errors name ``column`` and count rows from ``first``.
    """
    if not pa.types.is_integer(lengths.type):
        raise DataError(f"{column} holds {lengths.type}: expected whole numbers of tokens, as in CAST(... AS BIGINT)")
    fits = pc.fill_null(pc.greater_equal(lengths, 1), False)
    if (wrong := pc.index(fits, False).as_py()) >= 0:
        raise DataError(f"{column} is {lengths[wrong].as_py()} in row {first + wrong}: expected at least 1 token")


def sampling_costs(prompts: pa.Table, lengths: Sequence[int], rollout: RolloutConfig | None) -> Ints:
    """Return the expected cost of a sample of each prompt, from the prompts' ``lengths``. [N] -> [N].

    The unit is a sampled token: the expected response, plus one for every 16 tokens of the prompt. The expected
    response is the value of ``rollout.expected_length_column``, at most the row's and the rollout's limit; without the
    column, the row's limit. Where rows have neither, or ``rollout`` is None, the cost is the prompt's length: all
    responses are expected to be equally long.
    """
    read = np.asarray(lengths, dtype=np.int64)
    expected = None if rollout is None else rollout.expected_length_column
    named = [name for name in (expected, MAX_TOKENS) if name in prompts.column_names]
    if rollout is None or not named:
        return read
    longest = rollout.max_response_length
    limits = [longest if limit is None else min(limit, longest) for limit in limits_of(prompts)]
    response = np.array(limits, dtype=np.int64)
    if named[0] == expected:
        check_expected(prompts[expected], f"the column {expected!r} (rollout.expected_length_column)")
        response = np.minimum(response, prompts[expected].to_numpy().astype(np.int64))
    return response + read // _READ_FOR_ONE
