"""Plays episodes: the policy and an environment take turns, many episodes at once, until each has ended.

The engine takes the turns that are ready from one queue, while other episodes wait for their environments
(``episode_queue.py``); an episode becomes rows of tokens as it goes (``episode.py``). The ids of rows, their seeds and
so their tokens depend on the prompt's position alone, never on when an environment answered or which worker played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.config import EnvironmentsConfig, ImagesConfig, RolloutConfig, ValidationConfig
from siirl_dask.context import Codec, Context, Reduce
from siirl_dask.coordinator.blobs import rows_at
from siirl_dask.errors import ConfigError
from siirl_dask.nodes.episode import Episode, Rules
from siirl_dask.nodes.episode_queue import EpisodeQueue
from siirl_dask.nodes.episode_rows import EpisodeCodec, Item, Played
from siirl_dask.nodes.episode_table import EPISODE_ROWS, episode_table, log_episodes
from siirl_dask.nodes.generate import rollout_sampling, validation_sampling
from siirl_dask.nodes.partial_play import pack_kept_episodes, play_partial, unpack_kept_episodes
from siirl_dask.nodes.playing import (
    Answers,
    Game,
    check_chat,
    check_episodes,
    environment_seed,
    episodes_of_prompts,
    into,
    log_usage,
    queue_of,
)
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.nodes.sampling import EARLY_COLUMNS
from siirl_dask.planner import Changes, Groups, KeptRows, columns
from siirl_dask.rollout import LocalQueue, RolloutEngine, Sampling
from siirl_dask.schema import AGENT, GROUP_ID, IMAGES, OBSERVED_IMAGES, PROMPT, PROMPT_IDS, TOKENS, fields


def _pack(ctx: Context, **options: object) -> pa.Table:
    return pack_kept_episodes(ctx)


def _unpack(ctx: Context, table: pa.Table, **options: object) -> None:
    unpack_kept_episodes(ctx, table)


def _changes(
    *,
    environments: EnvironmentsConfig,
    images: ImagesConfig | None = None,
    world: str = "environments",
    **options: object,
) -> Changes:
    written = [AGENT] * bool(environments.agents) + [OBSERVED_IMAGES] * _are_shown(images)
    return Changes(reads=environments.row_columns, writes=fields(*written), neighbour=world)


def _are_shown(images: ImagesConfig | None) -> bool:
    return images is not None and images.observations


def _changes_of_play(*, rollout: RolloutConfig, environments: EnvironmentsConfig, **options: Any) -> Changes:
    changes = _changes(environments=environments, **options)
    kept = KeptRows(_pack, _unpack)
    groups = Groups.NEW  # some are of earlier steps
    return replace(changes, carries=kept, groups=groups) if rollout.partial else changes


def _try(*, rollout: RolloutConfig, **options: object) -> None:
    if rollout.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}: the ranks of such an engine begin all rows "
            "together, and an episode's next turn is not known before its environment has answered; leave it at 1"
        )
    if rollout.router_replay:
        raise ConfigError(
            "rollout.router_replay=true: an episode's rows have no routes of what its environment said; leave it out"
        )


def _try_play(*, rollout: RolloutConfig, environments: EnvironmentsConfig, **options: object) -> None:
    _try(rollout=rollout)
    if not rollout.partial:
        return
    if environments.rows_per_episode != 1:
        raise ConfigError(
            f"rollout.partial=true with environments.rows_per_episode={environments.rows_per_episode}: an episode that "
            "is played over several steps has one row; leave partial out, or take one agent and no new histories"
        )
    if environments.max_open is not None:
        raise ConfigError(
            f"rollout.partial=true with environments.max_open={environments.max_open}: environments of episodes that "
            "go on in the next step stay open, however many they are; leave one of them out"
        )


@columns(
    reads=[PROMPT, PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=EPISODE_ROWS,
    depends_on_options=_changes_of_play,
    expand=("rollout.rows_per_prompt", "environments.rows_per_episode"),
    groups="kept",
    early=EARLY_COLUMNS,
    trial=_try_play,
)
def play(
    ctx: Context,
    table: pa.Table,
    *,
    rollout: RolloutConfig,
    environments: EnvironmentsConfig,
    max_prompt_length: int,
    world: str = "environments",
    images: ImagesConfig | None = None,
) -> pa.Table:
    """Play ``rollout.n`` episodes from each prompt, with the environments of the role ``world`` on the same workers.

    Sample k of the prompt at position p is episode ``e = p * n + k``, and row j of the episode is row ``e * rows + j``,
    with ``rows`` the most rows of an episode (``environments.rows_per_episode``). A row's ``reward`` is the sum of its
    turns' rewards. An episode fails when its environment gives no answer or one that cannot be used: its rows have no
    reward, and EpisodeError ends the run when more fail than ``environments.max_failures``. With ``rollout.partial``
    the rows are those of the groups that are complete by now, from this step and from earlier ones: partial_play.py.
    """
    samplings, budget = [rollout_sampling(rollout)] * rollout.n, rollout.max_tokens_per_step
    return _play(ctx, table, samplings, environments, max_prompt_length, world, images, budget)


@columns(
    reads=[PROMPT, PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=EPISODE_ROWS,
    depends_on_options=_changes,
    expand=("validation.n", "environments.rows_per_episode"),
    groups="kept",
    early=EARLY_COLUMNS,
    trial=_try,
)
def play_answers(
    ctx: Context,
    table: pa.Table,
    *,
    rollout: RolloutConfig,
    environments: EnvironmentsConfig,
    validation: ValidationConfig,
    max_prompt_length: int,
    world: str = "environments",
    images: ImagesConfig | None = None,
) -> pa.Table:
    """Play ``validation.n`` episodes from each prompt as ``validation`` says, numbered as those of ``play``."""
    samplings = [validation_sampling(rollout, validation)] * validation.n
    return _play(ctx, table, samplings, environments, max_prompt_length, world, images)


def _play(
    ctx: Context,
    table: pa.Table,
    samplings: Sequence[Sampling],
    environments: EnvironmentsConfig,
    max_prompt_length: int,
    world: str,
    images: ImagesConfig | None,
    budget: int | None = None,
) -> pa.Table:
    engine: RolloutEngine = ctx.resource
    rules = Rules(
        sampling=samplings[0],
        turns=environments.turns,
        turn_tokens=environments.turn_tokens,
        rows=environments.rows_per_episode or 1,
        agents=environments.agents,
        max_prompt_length=max_prompt_length,
        context_length=engine.context_length,
    )
    n = len(samplings)
    several, shown = bool(environments.agents), _are_shown(images)
    make_rows = partial(episode_table, ctx, engine, rules=rules, n=n, agents=several, images=shown)
    game = Game(ctx.resources[world], rules, n, environments.max_open, make_rows)
    check_chat(ctx, table)
    if budget is not None:
        return play_partial(ctx, table, game, budget)
    episodes = episodes_of_prompts(table, n)
    played = _play_all(ctx, episodes, game)
    check_episodes(ctx, episodes, played, game.world)
    rows = make_rows(episodes, played)
    log_episodes(ctx, rows, played)
    return rows


def _play_all(ctx: Context, episodes: pa.Table, game: Game) -> list[Played]:
    """Return each episode as it was played, by this worker or by a peer that ran idle; the costliest begin first."""
    engine: RolloutEngine = ctx.resource
    order = np.argsort(-episodes[TOKENS].to_numpy(), kind="stable")
    schema, waiting = game.items(engine, rows_at(episodes, order))
    codec = _codec(schema, engine.version, game.rules.rows)

    def hand_over(number: int, played: Played) -> None:
        assert ctx.hand_over is not None
        ctx.hand_over(game.make_rows(episodes.slice(int(order[number]), 1), [played]))

    finished = None if ctx.hand_over is None else hand_over
    source = (
        LocalQueue(waiting, finished)
        if ctx.steal_from_peers is None
        else ctx.steal_from_peers(waiting, codec, finished)
    )
    ctx.free_device()
    queue = _serve(ctx, source, len(waiting), game)
    with ctx.device.waiting():
        played: list[Played] = source.results()
    ctx.log("rollout/taken_over", source.taken_over, Reduce.SUM)
    log_usage(ctx, queue.usage, min(queue.rows, len(waiting)))
    return [one for _, one in sorted(zip(order.tolist(), played, strict=True), key=lambda pair: pair[0])]


def _codec(schema: pa.Schema, version: int, rows: int) -> Codec[Item, Played]:
    checked = EpisodeCodec(schema, version, rows)
    renewed = partial(_codec, schema, version, rows)
    return Codec(checked.pack_item, checked.read_item, checked.pack_result, checked.read_result, renewed)


def _serve(ctx: Context, source: Any, own: int, game: Game) -> EpisodeQueue:
    """Let the engine play until no episode is left."""
    engine: RolloutEngine = ctx.resource
    answers: Answers = Answers()

    def make(item: Item) -> tuple[Episode, dict[str, Any], int]:
        episode = Episode(item, game.rules, engine.tokenizer, ctx.seed, engine.version, processor=engine.processor)
        return episode, game.row_of(item), environment_seed(ctx, item[GROUP_ID])

    with game.world.session(into(answers)) as session:
        queue = queue_of(ctx, game, source, own, make, session, answers)
        engine.serve(queue)
    return queue
