"""DAPO's dynamic sampling (arXiv:2503.14476): a group whose rewards are all equal teaches nothing, and is replaced.

Which groups stay, how many prompts are drawn in their place, and in what order they count is decided by every worker
alike, from which of all the workers' groups had a spread: the same rows come out on any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context
from siirl_dask.nodes.generate import generate
from siirl_dask.nodes.prompts import MAX_TOKENS, encode, reads_expected_length, skip_step
from siirl_dask.nodes.reward import score
from siirl_dask.nodes.sampling import SAMPLED
from siirl_dask.planner import Changes
from siirl_dask.planner import columns as declares
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

_WRITES = SAMPLED | fields(PROMPT_IDS, PROMPT_TEXT, REWARD, REWARD_PARTS)


def _changes(*, rollout: RolloutConfig, scorer: str, columns: Sequence[str], **options: object) -> Changes:
    expected = reads_expected_length(rollout=rollout)
    return replace(expected, reads=tuple(columns), neighbour=scorer, draws=True)


@declares(
    reads=[PROMPT, ANSWER],
    optional=[MAX_TOKENS],
    writes=_WRITES,
    expand="rollout.n",
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
) -> pa.Table:
    """``batch_size`` groups whose rewards differ, or fewer if ``rounds`` rounds of generation do not give as many.

    ``scorer`` is the role whose scorer, on the same workers, gives the rewards. Groups are numbered anew, in the order
    in which their prompts stand in the dataset; so are their rows. Draws as many prompts as are likely to be enough.
    """
    groups: list[int] = []
    parts: list[pa.Table] = []
    dropped: list[int] = []
    first, count = 0, batch_size
    for left in reversed(range(rounds)):
        prompts, too_long = encode(ctx, table, max_prompt_length=max_prompt_length, rollout=rollout)
        dropped += too_long
        rows = generate(ctx, prompts, rollout=rollout)
        rows = score(replace(ctx, resource=ctx.resources[scorer]), rows, columns=columns)
        found = _everywhere(ctx, _mixed_groups(rows), first, count)
        groups += found
        parts.append(rows)
        first += count
        if len(groups) >= batch_size or not left:
            break
        missing, rate = batch_size - len(groups), len(groups) / first
        count = min(batch_size, ceil(missing / rate)) if rate else batch_size
        table = ctx.draw_prompts(count)
    if not groups:
        total, kept = ctx.all_sum([len(dropped), sum(part.num_rows for part in parts)])
        if not kept:
            skip_step(ctx, dropped, int(total), max_prompt_length)
    if ctx.rank.rank == 0:  # all workers know the same
        ctx.log("data/drawn_prompts", first)
        ctx.log("data/generation_rounds", len(parts))
        ctx.log("data/mixed_groups", len(groups) / first)
    return _renumbered(pa.concat_tables(parts), groups[:batch_size], rollout.n)


def _mixed_groups(rows: pa.Table) -> list[int]:
    """Groups whose rewards are not all the same; failed rows are not counted."""
    spread = rows.group_by(GROUP_ID).aggregate([(REWARD, "min"), (REWARD, "max")])
    mixed = pc.greater(spread[f"{REWARD}_max"], spread[f"{REWARD}_min"])
    found: list[int] = spread.filter(mixed)[GROUP_ID].to_pylist()
    return found


def _everywhere(ctx: Context, mine: Sequence[int], first: int, count: int) -> list[int]:
    """All workers' groups among the ``count`` from ``first`` on, ascending."""
    flags = np.zeros(count)
    flags[np.asarray(mine, dtype=np.int64) - first] = 1
    found: list[int] = (np.flatnonzero(ctx.all_sum(flags.tolist())) + first).tolist()
    return found


def _renumbered(rows: pa.Table, groups: Sequence[int], n: int) -> pa.Table:
    """The rows of ``groups``, the one at place p of which becomes group p."""
    place = {group: at for at, group in enumerate(groups)}
    rows = rows.filter(pc.is_in(rows[GROUP_ID], pa.array(groups, TYPES[GROUP_ID])))
    numbers = np.array([place[group] for group in rows[GROUP_ID].to_pylist()], dtype=np.int64)
    row_ids = numbers * n + rows[ROW_ID].to_numpy() % n
    for name, ids in {GROUP_ID: numbers, ROW_ID: row_ids}.items():
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(ids, TYPES[name]))
    return rows.take(pc.sort_indices(rows[ROW_ID]))
