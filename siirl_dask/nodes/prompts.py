"""Turns the dataset's prompts into token ids, drops prompts that are too long, and estimates
what each one costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.config import ImagesConfig, RolloutConfig
from siirl_dask.context import Context, Reduce
from siirl_dask.errors import DataError, Origin, SiirlError
from siirl_dask.nodes.failures import row_location
from siirl_dask.nodes.prompt_images import check_images, encode_with_images, image_column
from siirl_dask.planner import ContractChanges, columns
from siirl_dask.rollout import RolloutEngine
from siirl_dask.schema import IMAGES, PROMPT, PROMPT_IDS, PROMPT_TEXT, ROW_ID, TOKENS, TYPES, fields
from siirl_dask.tables import Ints, rows_where

MAX_TOKENS = "max_tokens"
"""An optional column of the dataset: the row's own limit of response tokens, below
``rollout.max_response_length``."""
_NULL_PROMPT = "its prompt is null: remove such rows, or name another column (data.prompt)"
_PREFILL_TOKENS_PER_SAMPLED = 16
"""Prompt tokens whose prefill takes as long as sampling one token. So many, since the tokens of a
prompt are computed together, and once for its n samples."""


def prompt_columns(
    *,
    rollout: RolloutConfig | None = None,
    column: str = PROMPT,
    images: ImagesConfig | None = None,
    **options: object,
) -> ContractChanges:
    """Declare, for ``depends_on_options``, the columns of the prompt and of its images, and that
    ``rollout.expected_length_column`` is read where a dataset has it.
    """
    expected = None if rollout is None else rollout.expected_length_column
    changes = ContractChanges(reads=(column,), optional=() if expected is None else (expected,))
    if images is None or images.column is None:
        return changes
    name = image_column(images, column)
    drops = () if name == IMAGES else (name,)
    return replace(changes, reads=(column, name), writes=fields(IMAGES), drops=drops)


@columns(
    reads=[PROMPT],
    optional=[MAX_TOKENS],
    depends_on_options=prompt_columns,
    writes=fields(PROMPT_IDS, PROMPT_TEXT),
    new_rows=True,
    groups="kept",
)
def encode_prompts(
    ctx: Context,
    table: pa.Table,
    *,
    max_prompt_length: int,
    rollout: RolloutConfig | None = None,
    column: str = PROMPT,
    images: ImagesConfig | None = None,
    continue_answers: bool = False,
) -> pa.Table:
    """Add each prompt's token ids, and as its size what sampling from it costs
    (``sampling_costs``).

    The prompt is what ``column`` holds: the dataset's, or what another agent has written
    (``hand_over``). With ``images.column`` the prompts' images are read as well, and each one's
    placeholder is repeated for its tokens. With ``continue_answers`` the model continues a last
    message of the assistant.

    A prompt of more than ``max_prompt_length`` tokens is dropped from its step and counted; the
    rule looks at the prompt alone, so it drops the same rows on any number of workers. A worker may
    be left without rows; a step that leaves no worker any trains nothing
    (``driver/checks/prompts.py`` warns of it).

    ValueError for a prompt without tokens; DataError, with the row, for one that is null, that the
    chat template cannot write, or whose last message is the assistant's without
    ``continue_answers``; ImageError, with the row and the image, for an image that cannot be used.
    """
    engine: RolloutEngine = ctx.resource
    if images is not None and images.column is None:
        images = None
    if images is None:
        ids = []
        for row, prompt in enumerate(table[column].to_pylist()):
            ids.append(_encode(ctx, table, row, prompt, continue_answers))
        collapsed_ids = ids
    else:
        encode = partial(_encode, ctx, table, continue_answers=continue_answers)
        table, collapsed_ids, ids = encode_with_images(ctx, table, column, images, encode)
    for row_id, tokens in zip(table[ROW_ID].to_pylist(), ids, strict=True):
        if not tokens:
            raise ValueError(
                f"the prompt of row {row_id} has no tokens: the model needs at least one to go on "
                "from"
            )
    fits = [len(tokens) <= max_prompt_length for tokens in ids]
    dropped_lengths = [len(tokens) for tokens in ids if len(tokens) > max_prompt_length]
    ctx.log("data/prompts", len(ids) - len(dropped_lengths), Reduce.SUM)
    ctx.log("data/dropped_prompts", len(dropped_lengths), Reduce.SUM)
    if dropped_lengths:
        ctx.log("data/shortest_dropped_prompt", min(dropped_lengths), Reduce.MIN)
        table = rows_where(table, pa.array(fits))
        collapsed_ids = list(compress(collapsed_ids, fits))
        ids = list(compress(ids, fits))
    if images is not None:
        check_images(ctx, table, images)
    texts = [engine.tokenizer.decode(tokens, skip_special=False) for tokens in collapsed_ids]
    costs = sampling_costs(table, [len(tokens) for tokens in ids], rollout)
    table = table.set_column(table.column_names.index(TOKENS), TOKENS, pa.array(costs, pa.int64()))
    table = table.append_column(PROMPT_IDS, pa.array(ids, TYPES[PROMPT_IDS]))
    return table.append_column(PROMPT_TEXT, pa.array(texts, TYPES[PROMPT_TEXT]))


def _encode(
    ctx: Context,
    table: pa.Table,
    row: int,
    prompt: Any,
    continue_answers: bool,
) -> list[int]:
    """Return the token ids of a row's prompt. DataError, with the row, for one that cannot be
    used.
    """
    if prompt is None:
        raise _data_error(ctx, table, row, _NULL_PROMPT)
    tokenizer = ctx.resource.tokenizer
    options = {"continue_answer": True} if continue_answers else {}
    try:
        ids: list[int] = tokenizer.encode(prompt, **options)
    except DataError as error:
        raise _data_error(ctx, table, row, str(error)) from error
    except SiirlError:
        raise
    except Exception as error:  # a chat template may raise any exception
        reason = f"the chat template fails on its prompt: {type(error).__name__}: {error}"
        raise _data_error(ctx, table, row, reason) from error
    return ids


def _data_error(ctx: Context, table: pa.Table, row: int, reason: str) -> DataError:
    """Return the error for a row whose prompt cannot be used."""
    error = DataError(f"{row_location(ctx, table, row)}: {reason}")
    error.origin = Origin(rows=(table[ROW_ID][row].as_py(),))
    return error


def token_limits(rows: pa.Table) -> list[int | None]:
    """Return each row's own limit of response tokens, None where it has none. DataError for
    other values.
    """
    if MAX_TOKENS not in rows.column_names:
        return [None] * int(rows.num_rows)
    limits: list[object] = rows[MAX_TOKENS].to_pylist()
    for row_id, limit in zip(rows[ROW_ID].to_pylist(), limits, strict=True):
        if limit is not None and not (isinstance(limit, int) and limit >= 1):
            raise DataError(
                f"row {row_id} has {MAX_TOKENS}={limit!r}: expected a whole number of at least 1, "
                "or null"
            )
    return limits  # type: ignore[return-value]  # checked above


def check_expected_lengths(lengths: pa.ChunkedArray, column: str, first: int = 0) -> None:
    """Raise DataError for expected lengths that are no whole numbers of at least 1.

    Errors name ``column`` and count rows from ``first``.
    """
    if not pa.types.is_integer(lengths.type):
        raise DataError(
            f"{column} holds {lengths.type}: expected whole numbers of tokens, as in CAST(... AS "
            "BIGINT)"
        )
    fits = pc.fill_null(pc.greater_equal(lengths, 1), False)
    wrong = pc.index(fits, False).as_py()  # -1 where all fit
    if wrong >= 0:
        raise DataError(
            f"{column} is {lengths[wrong].as_py()} in row {first + wrong}: expected at least 1 "
            "token"
        )


def sampling_costs(
    prompts: pa.Table, lengths: Sequence[int], rollout: RolloutConfig | None
) -> Ints:
    """Return the expected cost of a sample of each prompt, from the prompts' ``lengths``. [N] ->
    [N].

    The unit is a sampled token: the expected response, plus one for every 16 tokens of the prompt.
    The expected response is the value of ``rollout.expected_length_column``, at most the row's and
    the rollout's limit; without the column, the row's limit. Where rows have neither, or
    ``rollout`` is None, the cost is the prompt's length: all responses are expected to be equally
    long.
    """
    prompt_lengths = np.asarray(lengths, dtype=np.int64)
    if rollout is None:
        return prompt_lengths
    expected = rollout.expected_length_column
    has_expected = expected in prompts.column_names
    if not has_expected and MAX_TOKENS not in prompts.column_names:
        return prompt_lengths
    longest = rollout.max_response_length
    limits = []
    for limit in token_limits(prompts):
        limits.append(longest if limit is None else min(limit, longest))
    response_lengths = np.array(limits, dtype=np.int64)
    if has_expected:
        check_expected_lengths(
            prompts[expected], f"the column {expected!r} (rollout.expected_length_column)"
        )
        expected_lengths = prompts[expected].to_numpy().astype(np.int64)
        response_lengths = np.minimum(response_lengths, expected_lengths)
    return response_lengths + prompt_lengths // _PREFILL_TOKENS_PER_SAMPLED
