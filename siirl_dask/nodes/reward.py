"""Scores responses by a reward function, which may begin with finished rows while others are
generated.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import RewardError
from siirl_dask.nodes.early_scores import EarlyScores
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS, reward_sums, sequences_of
from siirl_dask.nodes.failures import Failures, check_failures
from siirl_dask.planner import columns, reads_option
from siirl_dask.rewards import PASSED_IF_NAMED, Score, Scorer
from siirl_dask.schema import ANSWER, PROMPT, RESPONSE, REWARD, REWARD_PARTS, ROW_ID, TYPES, fields

_MAX_SHOWN = 200  # characters of a prompt or a response in an error


def argument_names(columns: Sequence[str]) -> list[str]:
    """Return the names of the arguments of a reward function that also gets ``columns``."""
    return [*dict.fromkeys([PROMPT, RESPONSE, ANSWER, *columns])]


def begin_scores(scorer: Scorer, *, columns: tuple[str, ...] = ()) -> EarlyScores:
    """Begin the work of ``score``, with the same options, on rows that are finished while others
    are generated.
    """
    return EarlyScores(scorer, _argument_names(scorer, columns))


def _argument_names(scorer: Scorer, columns: tuple[str, ...]) -> list[str]:
    """Return the names of the function's arguments, those columns included that it gets where it
    has an argument for them.
    """
    return argument_names([*columns, *scorer.named_columns])


@columns(
    reads=[PROMPT, RESPONSE, ANSWER],
    optional=EPISODE_COLUMNS,
    if_written=PASSED_IF_NAMED,
    writes=fields(REWARD, REWARD_PARTS),
    by_row=begin_scores,
    depends_on_options=reads_option("columns"),
)
def score(ctx: Context, table: pa.Table, *, columns: tuple[str, ...] = ()) -> pa.Table:
    """Add the scorer's reward of each row; its function also gets ``columns``, by name, and where
    it has an argument ``prompt_text`` the prompt as the model saw it, ``plain_response`` the
    response without any special token where that is another text, ``turns`` those of an episode.

    A row whose function fails gets a null reward and is left out of the loss, unless more rows of
    the step fail than ``rewards.max_failures`` allows: that stops the run with RewardError. A
    made-up score never trains.
    """
    scorer: Scorer = ctx.resource
    names = []
    for name in _argument_names(scorer, columns):
        if name in columns or name in table.column_names:
            names.append(name)
    rows = table.select(names).to_pylist()
    scores: Sequence[Score] | None = None
    early: EarlyScores | None = ctx.begun
    if early is not None:  # those that were scored while others were generated are not again
        ctx.log("rows/scored_early", early.done, Reduce.SUM)
        scores = early.finish(table[ROW_ID].to_pylist(), rows)
    if scores is None:
        scores = scorer.score(rows)
    failed = [index for index, score in enumerate(scores) if score.failure is not None]
    _check_failures(ctx, table, scores, failed)
    rewards = [score.reward for score in scores]
    assert rewards.count(None) == len(failed)
    ctx.log("reward/failures", len(failed), Reduce.SUM)
    part_names: set[str] = set()
    for one in scores:
        part_names.update(one.parts)
    for name in sorted(part_names - {REWARD}):
        values = [score.parts[name] for score in scores if name in score.parts]
        ctx.log(f"reward/{name}", values)
    table = table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))
    log_rewards(ctx, table, rewards)
    parts = [list(score.parts.items()) for score in scores]
    return table.append_column(REWARD_PARTS, pa.array(parts, TYPES[REWARD_PARTS]))


def _check_failures(
    ctx: Context,
    table: pa.Table,
    scores: Sequence[Score],
    failed: Sequence[int],
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


def log_rewards(ctx: Context, table: pa.Table, rewards: Sequence[float | None]) -> None:
    """Log mean and standard deviation of the rewards: of rows, or of episodes as far as this
    worker has their rows.
    """
    sequence_rewards = reward_sums(sequences_of(table), rewards)
    valid = [reward for reward in sequence_rewards if reward is not None]
    ctx.log("reward/mean", valid)
    ctx.log("reward/std", valid, Reduce.STD)
