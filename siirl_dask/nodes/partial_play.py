"""Partial rollouts of episodes: those that are long are played over several steps, with their environments open.

In a step the policy may sample so many tokens of an episode. One that has not ended by then stays on its worker with
its environment, between two turns or within one, and so does all of its group; in the next step it goes on with the
weights of that step. Its next token is drawn as if it was never interrupted. A drain step plays all to their ends.

An environment cannot be stored. What is stored with a step are the prompts of the groups that were kept: in a run that
goes on from there, their episodes begin again, with the seeds that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.context import Context, Reduce
from siirl_dask.coordinator.blobs import filled_by_group, once_per_group, rows_at, rows_where
from siirl_dask.environments import Session
from siirl_dask.errors import DataError
from siirl_dask.nodes.episode import Episode
from siirl_dask.nodes.episode_queue import OpenEpisode
from siirl_dask.nodes.episode_rows import Item, Played
from siirl_dask.nodes.episode_table import log_episodes
from siirl_dask.nodes.partial_rollout import blob_columns, with_older_ids
from siirl_dask.nodes.playing import (
    Answers,
    Game,
    check_episodes,
    environment_seed,
    episodes_of_prompts,
    into,
    log_usage,
    queue_of,
)
from siirl_dask.rollout import LocalQueue, RolloutEngine
from siirl_dask.schema import GROUP_ID, IDENTITY, ROW_ID, SAMPLE_NUMBER, SAMPLING_SEED, TOKENS, TYPES

_KEPT = "kept"
_ENVIRONMENT_SEED = "environment_seed"
_SEEDS = {SAMPLE_NUMBER: TYPES[SAMPLE_NUMBER], SAMPLING_SEED: TYPES[SAMPLING_SEED], _ENVIRONMENT_SEED: pa.int64()}
"""Columns of an episode's row that are those of the step in which it began."""
_A_STEP = 2**40  # added, for each step, to the number of an episode in the session: more than any has
_State = OpenEpisode | Played | None
"""An episode that goes on, one that has ended, or one that is still to begin."""


@dataclass(frozen=True, slots=True)
class _Lasting:
    """A session that stays open from step to step, and its answers."""

    session: Session
    answers: Answers


@dataclass(frozen=True, slots=True)
class _Kept:
    """Episodes that continue in the next step, whole groups of them."""

    rows: pa.Table
    states: list[_State]
    lasting: _Lasting | None


def play_partial(ctx: Context, table: pa.Table, game: Game, budget: int) -> pa.Table:
    """Return the rows of groups whose episodes have all ended; the policy gets ``budget`` tokens in each."""
    rows = _with_seeds(ctx, episodes_of_prompts(table, game.n), game.n)
    states: list[_State] = [None] * rows.num_rows
    kept: _Kept | None = ctx.state.pop(_KEPT, None)
    lasting = kept.lasting if kept is not None else None
    if kept is not None:
        older = with_older_ids(kept.rows).select(rows.column_names).cast(rows.schema)
        rows, states = pa.concat_tables([rows, older]), [*states, *kept.states]
    if lasting is None:
        answers: Answers = Answers()
        lasting = _Lasting(game.world.lasting_session(into(answers)), answers)
    try:
        ended = _play_on(ctx, game, rows, states, lasting, None if ctx.drain else budget)
        check_episodes(ctx, rows_at(rows, np.array([*ended], np.intp)), [*ended.values()], game.world)
    except BaseException as error:
        lasting.session.__exit__(type(error), error, error.__traceback__)
        raise
    whole = _whole_groups(rows, states)
    left = [state for state, is_whole in zip(states, whole, strict=True) if not is_whole]
    if left:
        ctx.state[_KEPT] = _Kept(rows_where(rows, ~whole), left, lasting)
    else:
        lasting.session.__exit__(None, None, None)
    ctx.log("rollout/kept_for_next_step", len(left), Reduce.SUM)
    played = [state for state, is_whole in zip(states, whole, strict=True) if is_whole and isinstance(state, Played)]
    made = game.make_rows(rows_where(rows, whole).drop_columns([_ENVIRONMENT_SEED]), played)
    log_episodes(ctx, made, played)
    return made


def pack_kept_episodes(ctx: Context) -> pa.Table:
    """Return the rows of the episodes that continue in the next step, without what was played of them."""
    kept: _Kept | None = ctx.state.get(_KEPT)
    if kept is None:
        return pa.schema([*((name, TYPES[name]) for name in IDENTITY), *_SEEDS.items()]).empty_table()
    return once_per_group(kept.rows, blob_columns(kept.rows))


def unpack_kept_episodes(ctx: Context, table: pa.Table) -> None:
    """Begin, in the next step, the episodes of ``pack_kept_episodes`` again. DataError when they are not such rows."""
    if missing := [name for name in _SEEDS if name not in table.column_names]:
        raise DataError(f"the episodes that were kept for later steps lack {missing}")
    ctx.state[_KEPT] = _Kept(filled_by_group(table, blob_columns(table)), [None] * table.num_rows, None)


def _with_seeds(ctx: Context, rows: pa.Table, n: int) -> pa.Table:
    numbers, groups = rows[ROW_ID].to_pylist(), rows[GROUP_ID].to_pylist()
    columns = {
        SAMPLE_NUMBER: [number % n for number in numbers],
        SAMPLING_SEED: [ctx.seed(number) for number in numbers],
        _ENVIRONMENT_SEED: [environment_seed(ctx, group) for group in groups],
    }
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values, _SEEDS[name]))
    return rows


def _play_on(
    ctx: Context, game: Game, rows: pa.Table, states: list[_State], lasting: _Lasting, budget: int | None
) -> dict[int, Played]:
    """Play until each episode has ended or spent its budget; note that in ``states``. Returns those that ended now."""
    engine: RolloutEngine = ctx.resource
    costs = rows[TOKENS].to_pylist()
    new = sorted((at for at, state in enumerate(states) if state is None), key=lambda at: -costs[at])
    under_way = {at: state for at, state in enumerate(states) if isinstance(state, OpenEpisode)}
    places, ended = [*new, *under_way], dict[int, Played]()

    def end(number: int, played: Played) -> None:
        ended[places[number]] = played

    def make(item: Item) -> tuple[Episode, dict[str, Any], int]:
        given, seed_of = (item, game.rules, engine.tokenizer), _always(item[SAMPLING_SEED])
        episode = Episode(*given, seed_of, engine.version, budget, processor=engine.processor)
        return episode, game.row_of(item), item[_ENVIRONMENT_SEED]

    begins = rows_at(rows, np.array(new, np.intp))
    _, items = game.items(engine, begins, SAMPLING_SEED, _ENVIRONMENT_SEED)
    source = LocalQueue(items, end)
    ctx.free_device()
    queue = queue_of(ctx, game, source, len(new), make, lasting.session, lasting.answers, first_key=ctx.step * _A_STEP)
    for number, own in enumerate(under_way.values(), len(new)):
        own.ticket, own.episode.version, own.episode.budget = number, engine.version, budget
    queue.resume([*under_way.values()])
    engine.serve(queue)
    for own in queue.put_aside:
        states[places[own.ticket]] = own
    for at, played in ended.items():
        states[at] = played
    log_usage(ctx, queue.usage, min(queue.rows, len(places)))
    return dict(sorted(ended.items()))


def _always(seed: int) -> Callable[[int], int]:
    """Return a function of a row's id that gives ``seed``: an episode that is played in parts has one row."""
    return lambda row_id: seed


def _whole_groups(rows: pa.Table, states: Sequence[_State]) -> NDArray[np.bool_]:
    """Return, for each episode, whether all of its group have ended."""
    groups = rows[GROUP_ID].to_numpy()
    waiting = [group for group, state in zip(groups.tolist(), states, strict=True) if not isinstance(state, Played)]
    return ~np.isin(groups, waiting)
