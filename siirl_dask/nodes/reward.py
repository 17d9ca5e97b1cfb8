"""Nodes that score responses: by a reward function or by a reward model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import Origin, RewardError
from siirl_dask.nodes.early_scores import EarlyScores, arguments
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.planner import columns, reads_option
from siirl_dask.planner import columns as declares
from siirl_dask.rewards import Score, Scorer
from siirl_dask.schema import (
    ANSWER,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    TYPES,
    fields,
)
from siirl_dask.training import RewardModel

logger = logging.getLogger(__name__)
_SHOWN = 200  # characters of a prompt or a response in an error
_LISTED = 3  # failed rows of a step that are logged one by one, where they are allowed


def begin_scores(scorer: Scorer, *, columns: tuple[str, ...] = ()) -> EarlyScores:
    """Begin the work of ``score``, with the same options, on rows that come while others are generated."""
    return EarlyScores(scorer, arguments(columns))


@declares(
    reads=[PROMPT, RESPONSE, ANSWER],
    writes=fields(REWARD, REWARD_PARTS),
    by_row=begin_scores,
    depends_on_options=reads_option("columns"),
)
def score(ctx: Context, table: pa.Table, *, columns: tuple[str, ...] = ()) -> pa.Table:
    """Add the scorer's reward of each row; its function also gets ``columns``, by name.

    A row whose function fails gets a null reward and is left out of the loss, unless more rows of the step fail than
    ``rewards.max_failures`` allows: that stops the run with RewardError. A made-up score never trains.
    """
    scores = _scores(ctx, table, table.select(arguments(columns)).to_pylist())
    failed = [index for index, result in enumerate(scores) if result.failure is not None]
    _check_failures(ctx, table, scores, failed)
    assert len(failed) + sum(result.reward is not None for result in scores) == len(scores)
    ctx.log("reward/failures", len(failed), Reduce.SUM)
    rewards = [result.reward for result in scores]
    valid = [reward for reward in rewards if reward is not None]
    ctx.log("reward/mean", valid)
    ctx.log("reward/std", valid, Reduce.STD)
    for name in sorted({name for result in scores for name in result.parts} - {REWARD}):
        ctx.log(f"reward/{name}", [result.parts[name] for result in scores if name in result.parts])
    table = table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))
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
    """Raise RewardError on all workers when more rows failed on all of them together than may; log allowed failures.

    A worker whose own rows exceed the bound has stopped scoring, and still takes part in the sum: its peers, which may
    have no failed row, wait there.
    """
    scorer: Scorer = ctx.resource
    (total,) = ctx.all_sum([len(failed)])
    if total <= scorer.max_failures:
        for index in failed[:_LISTED]:
            logger.warning("left out of the loss: %s", _describe(ctx, table, index, scores[index]))
        if len(failed) > _LISTED:
            logger.warning("step %d: left out of the loss: %d more rows", ctx.step, len(failed) - _LISTED)
        return
    allowed = f"rewards.max_failures={scorer.max_failures}"
    if not failed:
        raise RewardError(f"reward {scorer.name} failed for {total:.0f} rows of step {ctx.step} elsewhere ({allowed})")
    count = f"; it failed for at least {total:.0f} rows of the step ({allowed})" if total > 1 else ""
    error = RewardError(_describe(ctx, table, failed[0], scores[failed[0]]) + count)
    error.origin = Origin(rows=(table[ROW_ID][failed[0]].as_py(),))
    raise error


def _describe(ctx: Context, table: pa.Table, index: int, score: Score) -> str:
    """Return what failed, and the row that it failed for."""
    scorer: Scorer = ctx.resource
    row = table.select([ROW_ID, PROMPT, RESPONSE, ANSWER]).slice(index, 1).to_pylist()[0]
    return (
        f"reward {scorer.name} {score.failure}: row {row[ROW_ID]} of step {ctx.step}, "
        f"prompt {row[PROMPT]!r:.{_SHOWN}}, response {row[RESPONSE]!r:.{_SHOWN}}, answer {row[ANSWER]!r:.{_SHOWN}}"
    )


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(REWARD))
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
    ctx.log("reward/mean", scores.tolist())
    ctx.log("reward/std", scores.tolist(), Reduce.STD)
    return table.append_column(REWARD, pa.array(scores.numpy(), TYPES[REWARD]))
