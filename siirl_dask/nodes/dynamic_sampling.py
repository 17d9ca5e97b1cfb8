"""DAPO's dynamic sampling (arXiv:2503.14476): a group whose rewards are all equal teaches nothing,
and is replaced.

All workers learn which groups of all workers have different rewards. From that each computes the
same: which groups stay, how many prompts are drawn next, and how groups are numbered. The rows are
the same on any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.config import ImagesConfig, RolloutConfig
from siirl_dask.context import Context
from siirl_dask.errors import ConfigError
from siirl_dask.nodes.generate import generate
from siirl_dask.nodes.prompts import MAX_TOKENS, encode_prompts, prompt_columns
from siirl_dask.nodes.reward import begin_scores, score
from siirl_dask.nodes.routes import route_columns
from siirl_dask.nodes.sampling import SAMPLED
from siirl_dask.planner import ContractChanges, columns
from siirl_dask.rewards import Scorer
from siirl_dask.schema import (
    ANSWER,
    GROUP_ID,
    PROMPT,
    PROMPT_IDS,
    PROMPT_TEXT,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    TYPES,
    fields,
)
from siirl_dask.tables import rows_at, rows_where

_WRITES = SAMPLED | fields(PROMPT_IDS, PROMPT_TEXT, REWARD, REWARD_PARTS)


def _changes(
    *,
    rollout: RolloutConfig,
    scorer: str,
    columns: Sequence[str],
    images: ImagesConfig | None = None,
    **options: object,
) -> ContractChanges:
    changes = prompt_columns(rollout=rollout, images=images)
    return replace(
        changes,
        reads=(*changes.reads, *columns),
        writes={**changes.writes, **route_columns(rollout)},
        neighbour=scorer,
        draws=True,
    )


def _check_samples(*, rollout: RolloutConfig, **options: object) -> None:
    if rollout.n == 1:
        raise ConfigError(
            "rollout.n=1: no prompt has samples whose rewards differ, so that all of them would be "
            "left out; expected rollout.n of at least 2"
        )


@columns(
    reads=[PROMPT, ANSWER],
    optional=[MAX_TOKENS],
    writes=_WRITES,
    expand="rollout.n",
    groups="new",
    trial=_check_samples,
    depends_on_options=_changes,
)
def sample_until_mixed(
    ctx: Context,
    table: pa.Table,
    *,
    rollout: RolloutConfig,
    max_prompt_length: int,
    batch_size: int,
    rounds: int = 10,
    scorer: str = "reward",
    columns: tuple[str, ...] = (),
    images: ImagesConfig | None = None,
    continue_answers: bool = False,
) -> pa.Table:
    """Sample until ``batch_size`` groups have rewards that differ, in at most ``rounds`` rounds of
    generation.

    Each round draws as many prompts as are likely to be enough. Groups and rows get new numbers, in
    the dataset's order of their prompts. ``scorer`` is the role whose scorer, on the same workers,
    gives the rewards.
    """
    mixed: list[int] = []
    tables: list[pa.Table] = []
    drawn = 0
    count = batch_size
    for round_number in range(1, rounds + 1):
        prompts = encode_prompts(
            ctx,
            table,
            max_prompt_length=max_prompt_length,
            rollout=rollout,
            images=images,
            continue_answers=continue_answers,
        )
        rows = _sample_and_score(ctx, prompts, rollout, ctx.resources[scorer], columns)
        mixed += _on_all_workers(ctx, _mixed_groups(rows), drawn, count)
        tables.append(rows)
        drawn += count
        if len(mixed) >= batch_size or round_number == rounds:
            break
        count = _prompts_to_draw(batch_size, len(mixed), drawn)
        table = ctx.draw_prompts(count)
    if ctx.rank.rank == 0:  # all workers know the same
        ctx.log("data/drawn_prompts", drawn)
        ctx.log("data/generation_rounds", len(tables))
        ctx.log("data/mixed_groups", len(mixed) / drawn)
    return _renumber(pa.concat_tables(tables), mixed[:batch_size], rollout.n)


def _prompts_to_draw(batch_size: int, mixed: int, drawn: int) -> int:
    """Return how many prompts are likely to give the groups that are missing; at most
    ``batch_size``.
    """
    rate = mixed / drawn
    if not rate:
        return batch_size
    return min(batch_size, ceil((batch_size - mixed) / rate))


def _sample_and_score(
    ctx: Context,
    prompts: pa.Table,
    rollout: RolloutConfig,
    scorer: Scorer,
    columns: tuple[str, ...],
) -> pa.Table:
    """Sample responses and score them; with ``run.overlap``, finished ones are scored while
    others are sampled.
    """
    if not ctx.overlap or not scorer.works_beside:
        rows = generate(ctx, prompts, rollout=rollout)
        return score(replace(ctx, resource=scorer), rows, columns=columns)
    early = begin_scores(scorer, columns=columns)
    try:
        rows = generate(replace(ctx, hand_over=early.take), prompts, rollout=rollout)
        return score(replace(ctx, resource=scorer, begun=early), rows, columns=columns)
    finally:
        early.cancel()


def _mixed_groups(rows: pa.Table) -> list[int]:
    """Return the groups whose rewards are not all equal; rows without a reward do not count."""
    spread = rows.group_by(GROUP_ID).aggregate([(REWARD, "min"), (REWARD, "max")])
    mixed = pc.greater(spread[f"{REWARD}_max"], spread[f"{REWARD}_min"])
    groups: list[int] = spread.filter(mixed)[GROUP_ID].to_pylist()
    return groups


def _on_all_workers(ctx: Context, own: Sequence[int], first: int, count: int) -> list[int]:
    """Return the groups of all workers, ascending; they are among the ``count`` from ``first``
    on.
    """
    flags = np.zeros(count)
    flags[np.asarray(own, dtype=np.int64) - first] = 1
    groups: list[int] = (np.flatnonzero(ctx.all_sum(flags.tolist())) + first).tolist()
    return groups


def _renumber(rows: pa.Table, groups: Sequence[int], n: int) -> pa.Table:
    """Return the rows of ``groups`` under new ids: the group at index p of the list becomes
    group p.
    """
    number_of = {group: number for number, group in enumerate(groups)}
    rows = rows_where(rows, np.isin(rows[GROUP_ID].to_numpy(), groups))
    group_ids = np.array([number_of[group] for group in rows[GROUP_ID].to_pylist()], dtype=np.int64)
    row_ids = group_ids * n + rows[ROW_ID].to_numpy() % n
    for name, ids in {GROUP_ID: group_ids, ROW_ID: row_ids}.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(ids, TYPES[name]))
    return rows_at(rows, np.argsort(row_ids, kind="stable"))
