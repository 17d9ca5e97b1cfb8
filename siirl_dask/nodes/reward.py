"""Nodes that score responses: by a reward function or by a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import Origin, RewardError
from siirl_dask.nodes.early_scores import EarlyScores, argument_names
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS, reward_sums, sequences_of
from siirl_dask.nodes.failures import Failures, check_failures
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.planner import columns, reads_option
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

_MAX_SHOWN = 200  # characters of a prompt or a response in an error


def begin_scores(scorer: Scorer, *, columns: tuple[str, ...] = ()) -> EarlyScores:
    """Begin the work of ``score``, with the same options, on rows that are finished while others
    are generated.
    """
    return EarlyScores(scorer, _argument_names(scorer, columns))


def _argument_names(scorer: Scorer, columns: tuple[str, ...]) -> list[str]:
    """Return the names of the function's arguments, ``prompt_text`` included where it has an
    argument of that name.
    """
    names = argument_names(columns)
    if scorer.reads_prompt_text and PROMPT_TEXT not in names:
        names.append(PROMPT_TEXT)
    return names


@columns(
    reads=[PROMPT, RESPONSE, ANSWER],
    optional=EPISODE_COLUMNS,
    if_written=[PROMPT_TEXT],
    writes=fields(REWARD, REWARD_PARTS),
    by_row=begin_scores,
    depends_on_options=reads_option("columns"),
)
def score(ctx: Context, table: pa.Table, *, columns: tuple[str, ...] = ()) -> pa.Table:
    """Add the scorer's reward of each row; its function also gets ``columns``, by name, and where
    it has an argument ``prompt_text`` the prompt as the model saw it.

    A row whose function fails gets a null reward and is left out of the loss, unless more rows of
    the step fail than ``rewards.max_failures`` allows: that stops the run with RewardError. A
    made-up score never trains.
    """
    names = []
    for name in _argument_names(ctx.resource, columns):
        if name in columns or name in table.column_names:
            names.append(name)
    scores = _score_rows(ctx, table, table.select(names).to_pylist())
    failed = [index for index, score in enumerate(scores) if score.failure is not None]
    _check_failures(ctx, table, scores, failed)
    rewards = [score.reward for score in scores]
    assert rewards.count(None) == len(failed)
    ctx.log("reward/failures", len(failed), Reduce.SUM)
    part_names = {name for score in scores for name in score.parts}
    for name in sorted(part_names - {REWARD}):
        values = [score.parts[name] for score in scores if name in score.parts]
        ctx.log(f"reward/{name}", values)
    table = table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))
    _log_rewards(ctx, table, rewards)
    parts = [list(score.parts.items()) for score in scores]
    return table.append_column(REWARD_PARTS, pa.array(parts, TYPES[REWARD_PARTS]))


def _score_rows(ctx: Context, table: pa.Table, rows: Sequence[dict[str, Any]]) -> Sequence[Score]:
    """Return the score of each row; those that were scored while others were generated are not
    scored again.
    """
    scorer: Scorer = ctx.resource
    early: EarlyScores | None = ctx.begun
    if early is not None:
        ctx.log("rows/scored_early", early.done, Reduce.SUM)
        scores = early.finish(table[ROW_ID].to_pylist(), rows)
        if scores is not None:
            return scores
    return scorer.score(rows)


def _check_failures(
    ctx: Context, table: pa.Table, scores: Sequence[Score], failed: Sequence[int]
) -> None:
    """Raise RewardError on all workers when more rows failed over all of them than
    ``rewards.max_failures``; log allowed failures.
    """
    scorer: Scorer = ctx.resource

    def describe(index: int) -> tuple[str, int]:
        row = table.select([ROW_ID, PROMPT, RESPONSE, ANSWER]).slice(index, 1).to_pylist()[0]
        prompt = f"{row[PROMPT]!r:.{_MAX_SHOWN}}"
        response = f"{row[RESPONSE]!r:.{_MAX_SHOWN}}"
        answer = f"{row[ANSWER]!r:.{_MAX_SHOWN}}"
        message = (
            f"reward {scorer.name} {scores[index].failure}: row {row[ROW_ID]} of step {ctx.step}, "
            f"prompt {prompt}, response {response}, answer {answer}"
        )
        return message, row[ROW_ID]

    check_failures(
        ctx,
        Failures(indices=failed, describe=describe),
        most=scorer.max_failures,
        key="rewards.max_failures",
        whose=f"reward {scorer.name}",
        kind="rows",
        error=RewardError,
    )


def _log_rewards(ctx: Context, table: pa.Table, rewards: Sequence[float | None]) -> None:
    """Log mean and standard deviation of the rewards: of rows, or of episodes as far as this
    worker has their rows.
    """
    sequence_rewards = reward_sums(sequences_of(table), rewards)
    valid = [reward for reward in sequence_rewards if reward is not None]
    ctx.log("reward/mean", valid)
    ctx.log("reward/std", valid, Reduce.STD)


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], optional=EPISODE_COLUMNS, writes=fields(REWARD))
def score_with_model(ctx: Context, table: pa.Table) -> pa.Table:
    """Add the reward model's score of each row, prompt and response. RewardError names a row
    with no finite score.
    """
    model: RewardModel = ctx.resource
    scores = model.scores(pack_rows(table).rows)
    finite = scores.isfinite()
    if not finite.all():
        index = int((~finite).nonzero()[0])
        row_id = table[ROW_ID][index].as_py()
        error = RewardError(
            f"the reward model gave {scores[index].item()}: expected a finite number "
            f"(row {row_id} of step {ctx.step}); with model.dtype=bfloat16, try float32"
        )
        error.origin = Origin(rows=(row_id,))
        raise error
    _log_rewards(ctx, table, scores.tolist())
    return table.append_column(REWARD, pa.array(scores.numpy(), TYPES[REWARD]))
