"""Partial rollouts of episodes: long ones are played over several steps, with their environments
open.

A step stops by a rule (``continued/step_rules.py``): each episode has sampled a budget of tokens, or enough
groups are whole. An episode that has not ended by then stays on its worker with its environment,
and so does all of its group; in the next step it continues with the weights of that step. Its next
token is drawn as if it was never interrupted. A drain step plays all episodes to their ends.

An environment cannot be stored. The prompts of the unfinished groups are stored with a step: in a
run that resumes from it, their episodes begin again, with the same seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Reduce
from siirl_dask.environments import Session
from siirl_dask.errors import DataError
from siirl_dask.nodes.continued.partial_rollout import blob_columns, with_older_ids
from siirl_dask.nodes.continued.row_progress import RowProgress
from siirl_dask.nodes.continued.step_rules import StepRule, rule_of_step
from siirl_dask.nodes.episodes.episode import Episode
from siirl_dask.nodes.episodes.episode_queue import OpenEpisode
from siirl_dask.nodes.episodes.episode_rows import Item, PlayedEpisode, PlayedRow
from siirl_dask.nodes.episodes.episode_table import log_episodes
from siirl_dask.nodes.episodes.play_common import (
    AnswerQueue,
    PlaySetup,
    answers_into,
    build_queue,
    check_episodes,
    environment_seed,
    log_usage,
    rows_of_new_episodes,
)
from siirl_dask.nodes.sampling import log_passes, serve
from siirl_dask.rollout import LocalQueue, RolloutEngine, processor_of
from siirl_dask.schema import (
    GROUP_ID,
    IDENTITY,
    ROW_ID,
    SAMPLE_NUMBER,
    SAMPLING_SEED,
    TOKENS,
    TYPES,
)
from siirl_dask.tables import filled_by_group, once_per_group, rows_at, rows_where

State = OpenEpisode | PlayedEpisode | None
"""An episode that continues, one that has ended, or None for one that has not begun."""
_UNFINISHED = "unfinished"  # in the node's state
_ENVIRONMENT_SEED = "environment_seed"
_SEEDS = {
    SAMPLE_NUMBER: TYPES[SAMPLE_NUMBER],
    SAMPLING_SEED: TYPES[SAMPLING_SEED],
    _ENVIRONMENT_SEED: pa.int64(),
}
"""Columns of an episode's row that depend on the step in which it began."""
# added, for each step, to an episode's number in the session: more than any row's id
_KEYS_OF_A_STEP = 2**63


@dataclass(frozen=True, slots=True)
class _LastingSession:
    """A session that stays open from step to step, and the queue of its answers."""

    session: Session
    answers: AnswerQueue

    def close(self, error: BaseException | None = None) -> None:
        """End the session, after ``error`` where there was one."""
        if error is None:
            self.session.__exit__(None, None, None)
        else:
            self.session.__exit__(type(error), error, error.__traceback__)


@dataclass(frozen=True, slots=True)
class _UnfinishedEpisode:
    """Episodes that continue in the next step, whole groups of them."""

    rows: pa.Table
    states: list[State]
    session: _LastingSession | None
    """None for episodes that were stored, and begin again."""


def play_partial(
    ctx: Context,
    table: pa.Table,
    setup: PlaySetup,
    rollout: RolloutConfig,
) -> pa.Table:
    """Return the rows of the groups that the step takes, whose episodes have all ended; the others
    stay in the node's state.
    """
    rows = _with_seeds(ctx, rows_of_new_episodes(table, setup.n), setup.n)
    states: list[State] = [None] * rows.num_rows
    session: _LastingSession | None = None
    earlier: _UnfinishedEpisode | None = ctx.state.pop(_UNFINISHED, None)
    if earlier is not None:
        earlier_rows = with_older_ids(earlier.rows).select(rows.column_names).cast(rows.schema)
        rows = pa.concat_tables([rows, earlier_rows])
        states = states + earlier.states
        session = earlier.session
    if session is None:
        answers: AnswerQueue = AnswerQueue()
        session = _LastingSession(
            setup.environments.lasting_session(answers_into(answers)), answers
        )
    groups: list[int] = rows[GROUP_ID].to_pylist()
    try:
        seeds = rows[SAMPLING_SEED].to_pylist()
        rule = rule_of_step(ctx, rollout, groups, seeds, [*map(_progress, states)])
        ended = _continue_episodes(ctx, setup, rows, states, session=session, rule=rule)
        ended_rows = rows_at(rows, np.array([*ended], np.intp))
        check_episodes(ctx, ended_rows, [*ended.values()], setup.environments)
        choice = rule.choose([*map(_progress, states)])
    except BaseException as error:
        session.close(error)
        raise
    _begin_again(session, groups, states, choice.dropped)
    if rollout.window:
        ctx.log("rollout/dropped_groups", len(choice.dropped), Reduce.SUM)
    complete = np.isin(rows[GROUP_ID].to_numpy(), [*choice.taken])
    unfinished = list(compress(states, ~complete))
    if unfinished:
        ctx.state[_UNFINISHED] = _UnfinishedEpisode(
            rows_where(rows, ~complete), unfinished, session
        )
    else:
        session.close()
    ctx.log("rollout/kept_for_next_step", len(unfinished), Reduce.SUM)
    played = [state for state in compress(states, complete) if isinstance(state, PlayedEpisode)]
    complete_rows = rows_where(rows, complete).drop_columns([_ENVIRONMENT_SEED])
    made = setup.make_rows(complete_rows, played)
    log_episodes(ctx, made, played)
    return made


def pack_unfinished_episodes(ctx: Context) -> pa.Table:
    """Return the rows of the episodes that continue in the next step, without the turns that
    were played.
    """
    unfinished: _UnfinishedEpisode | None = ctx.state.get(_UNFINISHED)
    if unfinished is None:
        identity = {name: TYPES[name] for name in IDENTITY}
        return pa.schema(identity | _SEEDS).empty_table()
    return once_per_group(unfinished.rows, blob_columns(unfinished.rows))


def unpack_unfinished_episodes(ctx: Context, table: pa.Table) -> None:
    """Put the episodes of ``pack_unfinished_episodes`` into the node's state: they begin again in
    the next step.

    DataError when they are not such rows.
    """
    missing = [name for name in _SEEDS if name not in table.column_names]
    if missing:
        raise DataError(f"the episodes that were kept for later steps lack {missing}")
    rows = filled_by_group(table, blob_columns(table))
    ctx.state[_UNFINISHED] = _UnfinishedEpisode(rows, [None] * table.num_rows, None)


def _with_seeds(ctx: Context, rows: pa.Table, n: int) -> pa.Table:
    """Add the columns ``_SEEDS`` to the rows of new episodes."""
    numbers = rows[ROW_ID].to_pylist()
    columns = {
        SAMPLE_NUMBER: [number % n for number in numbers],
        SAMPLING_SEED: [ctx.seed(number) for number in numbers],
        _ENVIRONMENT_SEED: [environment_seed(ctx, group) for group in rows[GROUP_ID].to_pylist()],
    }
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values, _SEEDS[name]))
    return rows


def _progress(state: State) -> RowProgress:
    """Return the progress of the episode's row: it has one, or none before its environment has
    answered.
    """
    rows: Sequence[PlayedRow] = ()
    match state:
        case OpenEpisode():
            rows = state.episode.rows
        case PlayedEpisode():
            rows = state.rows
    if not rows:
        return RowProgress(False, [], [], [])
    (row,) = rows
    return RowProgress(isinstance(state, PlayedEpisode), row.response, row.versions, row.logprobs)


def _begin_again(
    session: _LastingSession,
    groups: Sequence[int],
    states: list[State],
    dropped: Iterable[int],
) -> None:
    """Close the environments of dropped groups: their episodes begin again, with the same seeds
    and the weights of the next step, so that no prompt is lost.
    """
    too_old = {*dropped}
    for index, state in enumerate(states):
        if groups[index] not in too_old:
            continue
        if isinstance(state, OpenEpisode):
            session.session.close(state.key)
        states[index] = None


def _continue_episodes(
    ctx: Context,
    setup: PlaySetup,
    rows: pa.Table,
    states: list[State],
    *,
    session: _LastingSession,
    rule: StepRule,
) -> dict[int, PlayedEpisode]:
    """Play until each episode has ended or spent its budget, or the rule has enough, and update
    ``states``.

    Returns the episodes that have ended in this step, by their index in ``rows``.
    """
    engine: RolloutEngine = ctx.resource
    costs = rows[TOKENS].to_pylist()
    begins = [
        index for index, state in enumerate(states) if state is None and rule.budget_of(index) != 0
    ]
    new = sorted(begins, key=lambda index: -costs[index])
    open_episodes = {
        index: state for index, state in enumerate(states) if isinstance(state, OpenEpisode)
    }
    index_of_ticket = [*new, *open_episodes]
    index_of_row = {row_id: index for index, row_id in enumerate(rows[ROW_ID].to_pylist())}
    ended: dict[int, PlayedEpisode] = {}

    def on_result(ticket: int, played: PlayedEpisode) -> None:
        index = index_of_ticket[ticket]
        ended[index] = played
        rule.row_ended(index)

    def make_episode(item: Item) -> tuple[Episode, dict[str, Any], int]:
        sampling_seed = item[SAMPLING_SEED]
        episode = Episode(
            item=item,
            rules=setup.rules,
            tokenizer=engine.tokenizer,
            seed_of=lambda row_id: sampling_seed,  # an episode that is played in parts has one row
            version=engine.version,
            budget=rule.budget_of(index_of_row[item[ROW_ID]]),
            processor=processor_of(engine),
        )
        return episode, setup.row_of(item), item[_ENVIRONMENT_SEED]

    new_rows = rows_at(rows, np.array(new, np.intp))
    _, items = setup.items(engine, new_rows, [SAMPLING_SEED, _ENVIRONMENT_SEED])
    ctx.free_device()
    queue = build_queue(
        ctx,
        setup,
        source=LocalQueue(items, on_result),
        own_count=len(new),
        make_episode=make_episode,
        session=session.session,
        answers=session.answers,
        first_key=ctx.step * _KEYS_OF_A_STEP,
        has_enough=rule.has_enough,
    )
    for ticket, (index, opened) in enumerate(open_episodes.items(), len(new)):
        opened.ticket = ticket
        opened.episode.version = engine.version
        opened.episode.budget = rule.budget_of(index)
    queue.resume([*open_episodes.values()])
    serve(ctx, queue)
    for opened in queue.suspended:
        states[index_of_ticket[opened.ticket]] = opened
    for index, played in ended.items():
        states[index] = played
    log_usage(ctx, queue.usage, min(queue.rows, len(index_of_ticket)))
    log_passes(ctx)
    return dict(sorted(ended.items()))
