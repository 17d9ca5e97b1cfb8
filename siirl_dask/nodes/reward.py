"""Scoring responses."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import RewardError
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
_TOLD = 3  # rows of a step that are told one by one, of those that may fail


@declares(
    reads=[PROMPT, RESPONSE, ANSWER], writes=fields(REWARD, REWARD_PARTS), depends_on_options=reads_option("columns")
)
def score(ctx: Context, table: pa.Table, *, columns: tuple[str, ...] = ()) -> pa.Table:
    """The scorer's reward of each row; its function also gets ``columns``, by name.

    A row whose function fails stops the run with RewardError, unless ``rewards.max_failures`` allows as many as there
    are in the step: then its reward is null, and it is left out of the loss. A made-up score never trains.
    """
    scorer: Scorer = ctx.resource
    scores = scorer.score(table.select(dict.fromkeys([PROMPT, RESPONSE, ANSWER, *columns])).to_pylist())
    failed = [at for at, given in enumerate(scores) if given.failure is not None]
    _judge(ctx, table, scores, failed)
    ctx.log("reward/failures", len(failed), Reduce.SUM)
    rewards = [given.reward for given in scores]
    given = [reward for reward in rewards if reward is not None]
    ctx.log("reward/mean", given)
    ctx.log("reward/std", given, Reduce.STD)
    for name in sorted({name for score in scores for name in score.parts} - {REWARD}):
        ctx.log(f"reward/{name}", [score.parts[name] for score in scores if name in score.parts])
    table = table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))
    parts = [[*score.parts.items()] for score in scores]
    return table.append_column(REWARD_PARTS, pa.array(parts, TYPES[REWARD_PARTS]))


def _judge(ctx: Context, table: pa.Table, scores: Sequence[Score], failed: Sequence[int]) -> None:
    """RewardError when more rows failed than may, on all workers together: those without a failed row raise too."""
    scorer: Scorer = ctx.resource
    (total,) = ctx.all_sum([len(failed)])
    if total <= scorer.max_failures:
        for at in failed[:_TOLD]:
            logger.warning("left out of the loss: %s", _tell(ctx, table, at, scores[at]))
        if len(failed) > _TOLD:
            logger.warning("step %d: left out of the loss: %d more rows", ctx.step, len(failed) - _TOLD)
        return
    allowed = f"rewards.max_failures={scorer.max_failures}"
    if not failed:
        raise RewardError(f"reward {scorer.name} failed for {total:.0f} rows of step {ctx.step} elsewhere ({allowed})")
    more = f"; it failed for {total:.0f} rows of the step ({allowed})" if total > 1 else ""
    raise RewardError(_tell(ctx, table, failed[0], scores[failed[0]]) + more)


def _tell(ctx: Context, table: pa.Table, at: int, score: Score) -> str:
    scorer: Scorer = ctx.resource
    row = table.select([ROW_ID, PROMPT, RESPONSE, ANSWER]).slice(at, 1).to_pylist()[0]
    return (
        f"reward {scorer.name} {score.failure}: row {row[ROW_ID]} of step {ctx.step}, "
        f"prompt {row[PROMPT]!r:.{_SHOWN}}, response {row[RESPONSE]!r:.{_SHOWN}}, answer {row[ANSWER]!r:.{_SHOWN}}"
    )


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(REWARD))
def score_with_model(ctx: Context, table: pa.Table) -> pa.Table:
    """The reward model's score of each row, prompt and response. RewardError with the row that got no finite one."""
    model: RewardModel = ctx.resource
    scores = model.scores(pack_rows(table).rows)
    if not scores.isfinite().all():
        at = int((~scores.isfinite()).nonzero()[0])
        raise RewardError(
            f"the reward model gave {scores[at].item()}: expected a finite number (row {table[ROW_ID][at].as_py()} "
            f"of step {ctx.step}); with model.dtype=bfloat16, try float32"
        )
    ctx.log("reward/mean", scores.tolist())
    ctx.log("reward/std", scores.tolist(), Reduce.STD)
    return table.append_column(REWARD, pa.array(scores.numpy(), TYPES[REWARD]))
