"""The common part of nodes that play: makes a row for each episode, serves the engine its turns, tells what failed."""

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
from siirl_dask.coordinator.blobs import rows_at
from siirl_dask.environments import Answer, Environments, OnAnswer, Session
from siirl_dask.errors import EpisodeError, counted
from siirl_dask.nodes.episode import Episode, Rules
from siirl_dask.nodes.episode_queue import EpisodeQueue, Heard, Usage
from siirl_dask.nodes.episode_rows import SHOWN, Item, Played
from siirl_dask.nodes.failures import check_failures, failed_episodes
from siirl_dask.nodes.prompts import MAX_TOKENS, token_limits
from siirl_dask.nodes.sampling import prompt_images
from siirl_dask.rollout import RolloutEngine
from siirl_dask.schema import GROUP_ID, IMAGES, PROMPT, PROMPT_IDS, ROW_ID, TYPES

logger = logging.getLogger(__name__)
Answers = SimpleQueue[Heard]


@dataclass(frozen=True, slots=True)
class Game:
    """The environments, the rules, and how rows are made of what was played."""

    world: Environments
    rules: Rules
    n: int
    """Episodes of a prompt."""
    max_open: int | None
    make_rows: Callable[[pa.Table, Sequence[Played]], pa.Table]
    """Returns the rows of episodes that have ended, in their order."""

    def items(self, engine: RolloutEngine, episodes: pa.Table, *more: str) -> tuple[pa.Schema, list[Item]]:
        """Return what is needed to play each episode, and the schema of it besides ``SHOWN``; ``more`` are columns.

        Episodes of a group have the same objects as images.
        """
        given = (ROW_ID, GROUP_ID, PROMPT, PROMPT_IDS, MAX_TOKENS, *self.world.columns, *more)
        shown = prompt_images(engine, episodes)
        left_out = {IMAGES} if engine.processor is not None else set()  # to_pylist would copy them for each episode
        names = [name for name in dict.fromkeys(given) if name in episodes.column_names and name not in left_out]
        plain = episodes.select(names)
        return plain.schema, [{**item, SHOWN: own} for item, own in zip(plain.to_pylist(), shown, strict=True)]

    def row_of(self, item: Item) -> dict[str, Any]:
        """Return the columns of an episode's row that its environment is reset with."""
        files = [{"bytes": image.data, "path": image.path} for image in item[SHOWN]]
        return {name: item.get(name, files) for name in self.world.columns}


def episodes_of_prompts(table: pa.Table, n: int) -> pa.Table:
    """Return a row for each episode, ``n`` for each prompt, with the episode's number as its id."""
    rows = rows_at(table, np.repeat(np.arange(table.num_rows), n))
    numbers = table[ROW_ID].to_numpy().repeat(n) * n + np.tile(np.arange(n), table.num_rows)
    token_limits(rows)  # refuses what is no limit
    return rows.set_column(rows.column_names.index(ROW_ID), ROW_ID, pa.array(numbers, TYPES[ROW_ID]))


def check_chat(ctx: Context, episodes: pa.Table) -> None:
    """Raise ConfigError, before anything is sampled, for chat prompts whose template cannot be continued."""
    kind = episodes.schema.field(PROMPT).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        ctx.resource.tokenizer.check_turns()


def environment_seed(ctx: Context, group: int) -> int:
    """Return the seed of the environments of a prompt's samples: what a group compares begins alike."""
    return ctx.seed(-1 - group)


def into(answers: Answers) -> OnAnswer:
    """Return a function that puts the answers of a session into a queue, with their time."""

    def answered(episode: int, answer: Answer) -> None:
        answers.put((episode, answer, time.monotonic()))

    return answered


def queue_of(
    ctx: Context,
    game: Game,
    source: Any,
    own: int,
    make: Callable[[Item], tuple[Episode, dict[str, Any], int]],
    session: Session,
    answers: Answers,
    *,
    first_key: int = 0,
) -> EpisodeQueue:
    """Return the queue of an engine that plays the episodes of ``source``, ``own`` of which are this worker's."""
    return EpisodeQueue(
        source=source,
        own=own,
        make=make,
        session=session,
        answers=answers,
        device=ctx.device,
        check_stop=ctx.check_stop,
        max_failures=game.world.max_failures,
        max_open=game.max_open,
        first_key=first_key,
    )


def log_usage(ctx: Context, usage: Usage, rows: int) -> None:
    """Log how the engine's ``rows`` were filled, and how long environments took."""
    ctx.log("rollout/busy_seconds", usage.seconds)
    ctx.log("rollout/longest_busy_seconds", usage.seconds, Reduce.MAX)
    ctx.log("rollout/rows_filled", usage.filled(rows), weight=rows)
    ctx.log("environments/seconds", usage.environment_seconds)
    ctx.log("environments/longest_seconds", max(usage.environment_seconds, default=0.0), Reduce.MAX)
    ctx.log("environments/most_open", usage.most_open, Reduce.MAX)


def check_episodes(ctx: Context, episodes: pa.Table, played: Sequence[Played], world: Environments) -> None:
    """Raise EpisodeError on all workers when more episodes, or calls of tools, failed on all of them than may."""

    def describe(at: int) -> tuple[str, int]:
        row: Mapping[str, Any] = episodes.select([ROW_ID, PROMPT]).slice(at, 1).to_pylist()[0]
        turns = sum(len(own.turns) for own in played[at].rows)
        told = (
            f"the environment {played[at].failure}: episode {row[ROW_ID]} of step {ctx.step}, after "
            f"{counted(turns, 'turn')}, prompt {row[PROMPT]!r:.200}"
        )
        return told, row[ROW_ID]

    failures = [one.failure for one in played]
    check_failures(
        ctx,
        failed_episodes(failures, describe),
        most=world.max_failures,
        key="environments.max_failures",
        whose="the environment",
        kind="episodes",
        error=EpisodeError,
    )
    _check_tool_calls(ctx, world)


def _check_tool_calls(ctx: Context, world: Environments) -> None:
    """Log the calls of tools, and raise EpisodeError on all workers when a larger share of them failed than may."""
    made = world.take_tool_calls()
    if made.calls:
        ctx.log("tools/calls", made.calls, Reduce.SUM)
        ctx.log("tools/failed", made.failed, Reduce.SUM)
    if made.failed and made.failed == made.calls:
        logger.warning("step %d: each of %d calls of tools failed; the last one %s", ctx.step, made.calls, made.reason)
    most = world.max_failed_calls
    if most is None:
        return
    calls, failed = ctx.all_sum([made.calls, made.failed])
    if failed > most * calls:
        reason = f"; the last one here {made.reason}" if made.reason else ""
        raise EpisodeError(
            f"{failed:.0f} of {calls:.0f} calls of tools of step {ctx.step} failed (environments.max_failed_calls="
            f"{most}){reason}"
        )
