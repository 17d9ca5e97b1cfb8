"""The common part of nodes that play episodes: rows of episodes, the engine's queue of turns,
checks of failures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.environments import Answer, Environments, OnAnswer, Session
from siirl_dask.errors import EpisodeError, counted
from siirl_dask.nodes.episodes.episode import Episode, EpisodeRules
from siirl_dask.nodes.episodes.episode_queue import (
    EpisodeQueue,
    HasEnough,
    PlayStatistics,
    TimedAnswer,
)
from siirl_dask.nodes.episodes.episode_rows import PROMPT_IMAGES, Item, PlayedEpisode
from siirl_dask.nodes.failures import check_failures, failed_episodes
from siirl_dask.nodes.prompts import MAX_TOKENS, token_limits
from siirl_dask.nodes.sampling import prompt_images
from siirl_dask.rollout import RolloutEngine, processor_of
from siirl_dask.schema import GROUP_ID, IMAGES, PROMPT, PROMPT_IDS, ROW_ID, TYPES
from siirl_dask.tables import rows_at

logger = logging.getLogger(__name__)
AnswerQueue = SimpleQueue[TimedAnswer]


@dataclass(frozen=True, slots=True)
class PlaySetup:
    """The environments, the rules, and the function that makes rows of played episodes."""

    environments: Environments
    rules: EpisodeRules
    n: int
    """Episodes of a prompt."""
    max_open: int | None
    make_rows: Callable[[pa.Table, Sequence[PlayedEpisode]], pa.Table]
    """Returns the rows of episodes that have ended, in their order."""

    def items(
        self,
        engine: RolloutEngine,
        episodes: pa.Table,
        more_columns: Sequence[str] = (),
    ) -> tuple[pa.Schema, list[Item]]:
        """Return the schema of an item without ``PROMPT_IMAGES``, and the item of each episode.

        An item has the columns that are needed to play the episode, and ``more_columns``. Episodes
        of a group have the same objects as images.
        """
        needed = [
            ROW_ID,
            GROUP_ID,
            PROMPT,
            PROMPT_IDS,
            MAX_TOKENS,
            *self.environments.columns,
            *more_columns,
        ]
        images = prompt_images(engine, episodes)
        names = [name for name in dict.fromkeys(needed) if name in episodes.column_names]
        if processor_of(engine) is not None and IMAGES in names:
            names.remove(IMAGES)  # to_pylist would copy the images for each episode
        table = episodes.select(names)
        items: list[Item] = [
            {**row, PROMPT_IMAGES: own} for row, own in zip(table.to_pylist(), images, strict=True)
        ]
        return table.schema, items

    def row_of(self, item: Item) -> dict[str, Any]:
        """Return the columns of an episode's row that its environment is reset with."""
        files = [{"bytes": image.data, "path": image.path} for image in item[PROMPT_IMAGES]]
        return {name: item.get(name, files) for name in self.environments.columns}


def rows_of_new_episodes(table: pa.Table, n: int) -> pa.Table:
    """Return a row for each episode, ``n`` for each prompt, with the episode's number as its id.

    DataError for a row's own limit of tokens that is not a number of at least 1.
    """
    rows = rows_at(table, np.repeat(np.arange(table.num_rows), n))
    first_numbers = table[ROW_ID].to_numpy() * n
    within_prompt = np.tile(np.arange(n), table.num_rows)
    numbers = first_numbers.repeat(n) + within_prompt
    token_limits(rows)
    return rows.set_column(
        rows.column_names.index(ROW_ID), ROW_ID, pa.array(numbers, TYPES[ROW_ID])
    )


def check_chat(ctx: Context, episodes: pa.Table) -> None:
    """Raise ConfigError, before anything is sampled, for chat prompts whose template cannot be
    continued.
    """
    kind = episodes.schema.field(PROMPT).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        ctx.resource.tokenizer.check_turns()


def environment_seed(ctx: Context, group: int) -> int:
    """Return the seed of the environments of a prompt's samples: all episodes of a group begin
    in the same state.
    """
    return ctx.seed(-1 - group)


def answers_into(queue: AnswerQueue) -> OnAnswer:
    """Return a function that puts the answers of a session into a queue, with their time."""

    def on_answer(episode: int, answer: Answer) -> None:
        queue.put((episode, answer, time.monotonic()))

    return on_answer


def build_queue(
    ctx: Context,
    setup: PlaySetup,
    *,
    source: Any,
    own_count: int,
    make_episode: Callable[[Item], tuple[Episode, dict[str, Any], int]],
    session: Session,
    answers: AnswerQueue,
    first_key: int = 0,
    has_enough: HasEnough | None = None,
) -> EpisodeQueue:
    """Return the queue of an engine that plays the episodes of ``source``, ``own_count`` of
    which are this worker's.
    """
    return EpisodeQueue(
        source=source,
        own_count=own_count,
        make_episode=make_episode,
        session=session,
        answers=answers,
        device=ctx.device,
        check_stop=ctx.check_stop,
        max_failures=setup.environments.max_failures,
        max_open=setup.max_open,
        first_key=first_key,
        has_enough=has_enough,
    )


def log_usage(ctx: Context, usage: PlayStatistics, rows: int) -> None:
    """Log the share of the engine's ``rows`` that was filled, and the seconds of environments'
    calls.
    """
    longest_call = max(usage.environment_seconds, default=0.0)
    ctx.log("rollout/busy_seconds", usage.seconds)
    ctx.log("rollout/longest_busy_seconds", usage.seconds, Reduce.MAX)
    ctx.log("rollout/rows_filled", usage.filled(rows), weight=rows)
    ctx.log("environments/seconds", usage.environment_seconds)
    ctx.log("environments/longest_seconds", longest_call, Reduce.MAX)
    ctx.log("environments/most_open", usage.most_open, Reduce.MAX)


def check_episodes(
    ctx: Context,
    episodes: pa.Table,
    played: Sequence[PlayedEpisode],
    environments: Environments,
) -> None:
    """Raise EpisodeError on all workers when over all of them more episodes failed than
    ``environments.max_failures``, or a larger share of the tools' calls than
    ``environments.max_failed_calls``.
    """

    def describe(index: int) -> tuple[str, int]:
        row: Mapping[str, Any] = episodes.select([ROW_ID, PROMPT]).slice(index, 1).to_pylist()[0]
        turns = sum(len(played_row.turns) for played_row in played[index].rows)
        message = (
            f"the environment {played[index].failure}: episode {row[ROW_ID]} of step {ctx.step}, "
            f"after {counted(turns, 'turn')}, prompt {row[PROMPT]!r:.200}"
        )
        return message, row[ROW_ID]

    check_failures(
        ctx,
        failed_episodes([episode.failure for episode in played], describe),
        most=environments.max_failures,
        key="environments.max_failures",
        whose="the environment",
        kind="episodes",
        error=EpisodeError,
    )
    _check_tool_calls(ctx, environments)


def _check_tool_calls(ctx: Context, environments: Environments) -> None:
    """Log the calls of tools, and raise EpisodeError on all workers when a larger share of them
    failed than may.
    """
    own = environments.take_tool_calls()
    if own.calls:
        ctx.log("tools/calls", own.calls, Reduce.SUM)
        ctx.log("tools/failed", own.failed, Reduce.SUM)
    if own.failed and own.failed == own.calls:
        logger.warning(
            "step %d: each of %d calls of tools failed; the last one %s",
            ctx.step,
            own.calls,
            own.reason,
        )
    most = environments.max_failed_calls
    if most is None:
        return
    calls, failed = ctx.all_sum([own.calls, own.failed])
    if failed > most * calls:
        reason = f"; the last one here {own.reason}" if own.reason else ""
        raise EpisodeError(
            f"{failed:.0f} of {calls:.0f} calls of tools of step {ctx.step} failed "
            f"(environments.max_failed_calls={most}){reason}"
        )
