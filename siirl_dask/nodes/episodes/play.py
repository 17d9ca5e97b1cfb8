"""Plays episodes: the policy and an environment take turns, many episodes at once, until each has
ended.

The engine takes the turns that are ready from one queue, while other episodes wait for their
environments (``episode_queue.py``); an episode appends to its rows of tokens turn by turn
(``episode.py``). The ids of rows, their seeds and so their tokens depend on the prompt's position
alone, never on when an environment answered or which worker played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.config import EnvironmentsConfig, ImagesConfig, RolloutConfig, ValidationConfig
from siirl_dask.context import Codec, Context, Reduce
from siirl_dask.environments import Environments
from siirl_dask.errors import ConfigError
from siirl_dask.nodes.episodes.episode import Episode, EpisodeRules
from siirl_dask.nodes.episodes.episode_queue import EpisodeQueue
from siirl_dask.nodes.episodes.episode_rows import EpisodeCodec, Item, PlayedEpisode
from siirl_dask.nodes.episodes.episode_table import EPISODE_ROWS, episode_table, log_episodes
from siirl_dask.nodes.episodes.partial_play import (
    pack_unfinished_episodes,
    play_partial,
    unpack_unfinished_episodes,
)
from siirl_dask.nodes.episodes.play_common import (
    AnswerQueue,
    PlaySetup,
    answers_into,
    build_queue,
    check_chat,
    check_episodes,
    environment_seed,
    log_usage,
    rows_of_new_episodes,
)
from siirl_dask.nodes.evaluate import validation_sampling
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.nodes.sampling import (
    EARLY_COLUMNS,
    log_passes,
    rollout_sampling,
    serve,
    version_of_items,
)
from siirl_dask.planner import ContractChanges, Groups, KeptRows, columns
from siirl_dask.rollout import LocalQueue, RolloutEngine, Sampling, processor_of
from siirl_dask.schema import (
    AGENT,
    GROUP_ID,
    IMAGES,
    OBSERVED_IMAGES,
    PROMPT,
    PROMPT_IDS,
    TOKENS,
    fields,
)
from siirl_dask.tables import rows_at


def _pack(ctx: Context, **options: object) -> pa.Table:
    return pack_unfinished_episodes(ctx)


def _unpack(ctx: Context, table: pa.Table, **options: object) -> None:
    unpack_unfinished_episodes(ctx, table)


def _changes(
    *,
    environments: EnvironmentsConfig,
    images: ImagesConfig | None = None,
    world: str = "environments",
    **options: object,
) -> ContractChanges:
    writes: dict[str, pa.DataType] = {}
    if environments.agents:
        writes |= fields(AGENT)
    if _shows_images(images):
        writes |= fields(OBSERVED_IMAGES)
    return ContractChanges(reads=environments.row_columns, writes=writes, neighbour=world)


def _shows_images(images: ImagesConfig | None) -> bool:
    """Return whether environments may show images."""
    if images is None:
        return False
    return images.observations


def _play_changes(
    *, rollout: RolloutConfig, environments: EnvironmentsConfig, **options: Any
) -> ContractChanges:
    changes = _changes(environments=environments, **options)
    changes = replace(changes, in_flight=rollout.in_flight)
    if not rollout.continues_rows:
        return changes
    groups = Groups.NEW  # some are of earlier steps
    return replace(changes, carries=KeptRows(_pack, _unpack), groups=groups)


def _check_rollout(*, rollout: RolloutConfig, **options: object) -> None:
    if rollout.router_replay:
        raise ConfigError(
            "rollout.router_replay=true: an episode's rows have no routes of what its environment "
            "said; leave it out"
        )


def _check_partial_rollout(
    *, rollout: RolloutConfig, environments: EnvironmentsConfig, **options: object
) -> None:
    _check_rollout(rollout=rollout)
    if not rollout.continues_rows:
        return
    key = f"rollout.window={rollout.window}" if rollout.window else "rollout.partial=true"
    if environments.rows_per_episode != 1:
        raise ConfigError(
            f"{key} with "
            f"environments.rows_per_episode={environments.rows_per_episode}: an episode that "
            "is played over several steps has one row; leave it out, or take one agent and no "
            "new histories"
        )
    if environments.max_open is not None:
        raise ConfigError(
            f"{key} with environments.max_open={environments.max_open}: "
            "environments of episodes that "
            "go on in the next step stay open, however many they are; leave one of them out"
        )


@columns(
    reads=[PROMPT, PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=EPISODE_ROWS,
    depends_on_options=_play_changes,
    expand=("rollout.rows_per_prompt", "environments.rows_per_episode"),
    groups="kept",
    early=EARLY_COLUMNS,
    trial=_check_partial_rollout,
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
    """Play ``rollout.n`` episodes from each prompt, with the environments of the role ``world`` on
    the same workers.

    Sample k of the prompt at position p is episode ``e = p * n + k``, and row j of the episode is
    row ``e * rows + j``, with ``rows`` the most rows of an episode
    (``environments.rows_per_episode``). A row's ``reward`` is the sum of its turns' rewards. An
    episode fails when its environment gives no answer or one that cannot be used: its rows have no
    reward, and EpisodeError ends the run when more fail than ``environments.max_failures``. With
    ``rollout.partial`` or ``rollout.window`` the rows are those of groups that are complete by now,
    from this step and from earlier ones: partial_play.py.
    """
    return _play(
        ctx,
        table,
        sampling=rollout_sampling(rollout),
        n=rollout.n,
        config=environments,
        max_prompt_length=max_prompt_length,
        environments=ctx.resources[world],
        shows_images=_shows_images(images),
        continued=rollout if rollout.continues_rows else None,
    )


@columns(
    reads=[PROMPT, PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=EPISODE_ROWS,
    depends_on_options=_changes,
    expand=("validation.n", "environments.rows_per_episode"),
    groups="kept",
    early=EARLY_COLUMNS,
    trial=_check_rollout,
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
    """Play ``validation.n`` episodes from each prompt as ``validation`` says, numbered as those
    of ``play``.
    """
    return _play(
        ctx,
        table,
        sampling=validation_sampling(rollout, validation),
        n=validation.n,
        config=environments,
        max_prompt_length=max_prompt_length,
        environments=ctx.resources[world],
        shows_images=_shows_images(images),
    )


def _play(
    ctx: Context,
    table: pa.Table,
    *,
    sampling: Sampling,
    n: int,
    config: EnvironmentsConfig,
    max_prompt_length: int,
    environments: Environments,
    shows_images: bool,
    continued: RolloutConfig | None = None,
) -> pa.Table:
    engine: RolloutEngine = ctx.resource
    rules = EpisodeRules(
        sampling=sampling,
        turns=config.turns,
        turn_tokens=config.turn_tokens,
        rows=config.rows_per_episode or 1,
        agents=config.agents,
        max_prompt_length=max_prompt_length,
        context_length=engine.context_length,
    )
    make_rows = partial(
        episode_table,
        ctx,
        engine,
        rules=rules,
        n=n,
        agents=bool(config.agents),
        images=shows_images,
    )
    setup = PlaySetup(environments, rules, n, config.max_open, make_rows)
    check_chat(ctx, table)
    if continued is not None:
        return play_partial(ctx, table, setup, continued)
    episodes = rows_of_new_episodes(table, n)
    played = _play_all(ctx, episodes, setup)
    check_episodes(ctx, episodes, played, environments)
    rows = make_rows(episodes, played)
    log_episodes(ctx, rows, played)
    return rows


def _play_all(ctx: Context, episodes: pa.Table, setup: PlaySetup) -> list[PlayedEpisode]:
    """Return each episode as it was played, by this worker or by a peer that ran idle; the
    costliest begin first.
    """
    engine: RolloutEngine = ctx.resource
    order = np.argsort(-episodes[TOKENS].to_numpy(), kind="stable").tolist()
    schema, items = setup.items(engine, rows_at(episodes, np.array(order, np.intp)))
    codec = _codec(schema, version_of_items(ctx), setup.rules.rows)
    on_result = _early_rows(ctx, episodes, order, setup)
    if ctx.steal_from_peers is None:
        source = LocalQueue(items, on_result)
    else:
        source = ctx.steal_from_peers(items, codec, on_result)
    ctx.free_device()
    queue = _serve(ctx, source, len(items), setup)
    with ctx.device.waiting():
        played: list[PlayedEpisode] = source.results()
    ctx.log("rollout/taken_over", source.taken_over, Reduce.SUM)
    log_usage(ctx, queue.usage, min(queue.rows, len(items)))
    log_passes(ctx)
    in_row_order = dict(zip(order, played, strict=True))
    return [in_row_order[row] for row in range(len(order))]


def _early_rows(
    ctx: Context,
    episodes: pa.Table,
    order: Sequence[int],
    setup: PlaySetup,
) -> Callable[[int, PlayedEpisode], None] | None:
    """Return the function that hands the rows of a played episode to the next node, from the
    episode's index in ``order``; None where no node reads rows early.
    """
    hand_over = ctx.hand_over
    if hand_over is None:
        return None

    def on_result(index: int, played: PlayedEpisode) -> None:
        episode = episodes.slice(order[index], 1)
        hand_over(setup.make_rows(episode, [played]))

    return on_result


def _codec(schema: pa.Schema, version: int, rows: int) -> Codec[Item, PlayedEpisode]:
    """Return the codec of episodes that peers take over, at this version of the weights."""
    codec = EpisodeCodec(schema, version, rows)
    return Codec(
        pack_item=codec.pack_item,
        read_item=codec.read_item,
        pack_result=codec.pack_result,
        read_result=codec.read_result,
        renewed=partial(_codec, schema, version, rows),
    )


def _serve(ctx: Context, source: Any, own_count: int, setup: PlaySetup) -> EpisodeQueue:
    """Serve the engine until no episode is left; return its queue."""
    engine: RolloutEngine = ctx.resource
    answers: AnswerQueue = AnswerQueue()

    def make_episode(item: Item) -> tuple[Episode, dict[str, Any], int]:
        episode = Episode(
            item=item,
            rules=setup.rules,
            tokenizer=engine.tokenizer,
            seed_of=ctx.seed,
            version=engine.version,
            processor=processor_of(engine),
        )
        return episode, setup.row_of(item), environment_seed(ctx, item[GROUP_ID])

    with setup.environments.session(answers_into(answers)) as session:
        queue = build_queue(
            ctx,
            setup,
            source=source,
            own_count=own_count,
            make_episode=make_episode,
            session=session,
            answers=answers,
        )
        serve(ctx, queue)
    return queue
