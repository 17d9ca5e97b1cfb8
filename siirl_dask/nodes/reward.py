"""Nodes that score responses: by a reward function or by a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import Origin, RewardError
from siirl_dask.nodes.early_scores import EarlyScores, arguments
from siirl_dask.nodes.episodes import EPISODE, episodes_of, reward_sums
from siirl_dask.nodes.failures import Failed, check_failures
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.planner import columns, reads_option
from siirl_dask.planner import columns as declares
from siirl_dask.rewards import Score, Scorer
from siirl_dask.schema import (
    ANSWER,
    PROMPT,
    PROMPT_IDS,
    PROMPT_TEXT,
    RESPONSE,
    RESPONSE_IDS,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    TYPES,
    fields,
)
from siirl_dask.training import RewardModel

_SHOWN = 200  # characters of a prompt or a response in an error


def begin_scores(scorer: Scorer, *, columns: tuple[str, ...] = ()) -> EarlyScores:
    """Begin the work of ``score``, with the same options, on rows that come while others are generated."""
    return EarlyScores(scorer, _arguments(scorer, columns))


def _arguments(scorer: Scorer, columns: tuple[str, ...]) -> list[str]:
    """Return the names of the function's arguments, with the prompt's text as the model saw it where it names that."""
    names = arguments(columns)
    if scorer.reads_prompt_text and PROMPT_TEXT not in names:
        names.append(PROMPT_TEXT)
    return names


@declares(
    reads=[PROMPT, RESPONSE, ANSWER],
    optional=EPISODE,
    if_written=[PROMPT_TEXT],
    writes=fields(REWARD, REWARD_PARTS),
    by_row=begin_scores,
    depends_on_options=reads_option("columns"),
)
def score(ctx: Context, table: pa.Table, *, columns: tuple[str, ...] = ()) -> pa.Table:
    """Add the scorer's reward of each row; its function also gets ``columns``, by name, and where it has an argument
    ``prompt_text`` the prompt as the model saw it.

    A row whose function fails gets a null reward and is left out of the loss, unless more rows of the step fail than
    ``rewards.max_failures`` allows: that stops the run with RewardError. A made-up score never trains.
    """
    names = [name for name in _arguments(ctx.resource, columns) if name in columns or name in table.column_names]
    scores = _scores(ctx, table, table.select(names).to_pylist())
    failed = [index for index, result in enumerate(scores) if result.failure is not None]
    _check_failures(ctx, table, scores, failed)
    assert len(failed) + sum(result.reward is not None for result in scores) == len(scores)
    ctx.log("reward/failures", len(failed), Reduce.SUM)
    rewards = [result.reward for result in scores]
    for name in sorted({name for result in scores for name in result.parts} - {REWARD}):
        ctx.log(f"reward/{name}", [result.parts[name] for result in scores if name in result.parts])
    table = table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))
    _log_rewards(ctx, table, rewards)
    parts = [[*result.parts.items()] for result in scores]
    return table.append_column(REWARD_PARTS, pa.array(parts, TYPES[REWARD_PARTS]))


def _scores(ctx: Context, table: pa.Table, rows: Sequence[dict[str, Any]]) -> Sequence[Score]:
    """Return one score a row; many are there where the node has begun early."""
    scorer: Scorer = ctx.resource
    begun: EarlyScores | None = ctx.begun
    if begun is not None:
        ctx.log("rows/scored_early", begun.done, Reduce.SUM)
        if (scores := begun.finish(table[ROW_ID].to_pylist(), rows)) is not None:
            return scores
    return scorer.score(rows)


def _check_failures(ctx: Context, table: pa.Table, scores: Sequence[Score], failed: Sequence[int]) -> None:
    """Raise RewardError on all workers when more rows failed on all of them together than may; log allowed failures."""
    scorer: Scorer = ctx.resource

    def describe(index: int) -> tuple[str, int]:
        row = table.select([ROW_ID, PROMPT, RESPONSE, ANSWER]).slice(index, 1).to_pylist()[0]
        told = (
            f"reward {scorer.name} {scores[index].failure}: row {row[ROW_ID]} of step {ctx.step}, prompt "
            f"{row[PROMPT]!r:.{_SHOWN}}, response {row[RESPONSE]!r:.{_SHOWN}}, answer {row[ANSWER]!r:.{_SHOWN}}"
        )
        return told, row[ROW_ID]

    check_failures(
        ctx,
        Failed(numbers=failed, describe=describe),
        most=scorer.max_failures,
        key="rewards.max_failures",
        whose=f"reward {scorer.name}",
        kind="rows",
        error=RewardError,
    )


def _log_rewards(ctx: Context, table: pa.Table, rewards: Sequence[float | None]) -> None:
    """Log mean and spread of the rewards that there are: of rows, or of episodes as far as this worker has them."""
    sums = [reward for reward in reward_sums(episodes_of(table), rewards) if reward is not None]
    ctx.log("reward/mean", sums)
    ctx.log("reward/std", sums, Reduce.STD)


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], optional=EPISODE, writes=fields(REWARD))
def score_with_model(ctx: Context, table: pa.Table) -> pa.Table:
    """Add the reward model's score of each row, prompt and response. RewardError names a row with no finite score."""
    model: RewardModel = ctx.resource
    scores = model.scores(pack_rows(table).rows)
    if not scores.isfinite().all():
        index = int((~scores.isfinite()).nonzero()[0])
        error = RewardError(
            f"the reward model gave {scores[index].item()}: expected a finite number "
            f"(row {table[ROW_ID][index].as_py()} of step {ctx.step}); with model.dtype=bfloat16, try float32"
        )
        error.origin = Origin(rows=(table[ROW_ID][index].as_py(),))
        raise error
    _log_rewards(ctx, table, scores.tolist())
    return table.append_column(REWARD, pa.array(scores.numpy(), TYPES[REWARD]))
