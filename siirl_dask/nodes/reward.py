"""Nodes that score responses: by a reward function, which may begin with finished rows while others
are generated, or by a reward model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import Origin, RewardError
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS, reward_sums, sequences_of
from siirl_dask.nodes.failures import Failures, check_failures
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.planner import columns, reads_option
from siirl_dask.rewards import PASSED_IF_NAMED, Score, Scorer, Scoring
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


def argument_names(columns: Sequence[str]) -> list[str]:
    """Return the names of the arguments of a reward function that also gets ``columns``."""
    return [*dict.fromkeys([PROMPT, RESPONSE, ANSWER, *columns])]


class EarlyScores:
    """A RowWork: scores rows as they are finished, in other threads than the one that generates
    rows.
    """

    def __init__(self, scorer: Scorer, names: Sequence[str]) -> None:
        """``names`` are the arguments of the reward function."""
        self._names = names
        self._scoring: Scoring = scorer.begin()
        self._begun: dict[int, pa.Table] = {}
        """The rows whose scoring has begun, by their ids."""
        self._finished = False

    def take(self, rows: pa.Table) -> None:
        """Begin to score rows. Any thread may call it."""
        there = rows.column_names
        names = [name for name in self._names if name in there or name not in PASSED_IF_NAMED]
        # the node's own ``reads`` leave out an argument
        if not {*names} <= {*there}:
            return
        for at, row_id in enumerate(rows[ROW_ID].to_pylist()):
            row = rows.select(names).slice(at, 1)
            self._begun[row_id] = row
            self._scoring.add(row_id, partial(_arguments_of, row))

    @property
    def done(self) -> int:
        """Number of rows that have their score."""
        return self._scoring.done

    def finish(self, row_ids: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[Score] | None:
        """Return one score for each of ``rows``, which are the arguments of all rows; the others
        are scored now.

        None where a row that was scored early has changed since, or is gone: then neither scores
        nor failures count. None as well for a second call.
        """
        if self._finished:  # the node scores twice
            return None
        self._finished = True
        arguments_of_row = dict(zip(row_ids, rows, strict=True))
        for row_id, row in self._begun.items():
            if row_id not in arguments_of_row or _arguments_of(row) != arguments_of_row[row_id]:
                logger.warning(
                    "rows have changed since they were generated: all of them are scored again"
                )
                self.cancel()
                return None
        for row_id, arguments in arguments_of_row.items():
            if row_id not in self._begun:
                self._scoring.add(row_id, partial(dict, arguments))
        scores = self._scoring.finish()
        return [scores.get(row_id, Score()) for row_id in row_ids]

    def cancel(self) -> None:
        """Score no other row, and end the calls that are running."""
        self._scoring.cancel()


def _arguments_of(row: pa.Table) -> dict[str, Any]:
    """Return the columns of a table of one row as arguments."""
    (arguments,) = row.to_pylist()
    return dict(arguments)


_MAX_SHOWN = 200  # characters of a prompt or a response in an error


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
    _log_rewards(ctx, table, rewards)
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
