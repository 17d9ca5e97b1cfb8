"""Greedy responses, and their rewards as baselines (ReMax, arXiv:2310.10505)."""

from __future__ import annotations

from math import fsum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS
from siirl_dask.nodes.generate import route_changes, sample_rows
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.nodes.sampling import EARLY_COLUMNS, SAMPLED, greedy_sampling, rollout_sampling
from siirl_dask.planner import columns
from siirl_dask.schema import (
    AGENT,
    EPISODE_ID,
    GREEDY,
    GREEDY_REWARD,
    GROUP_ID,
    IMAGES,
    PROMPT_IDS,
    REWARD,
    TYPES,
    fields,
)

_BaselineKey = tuple[int, str | None]
"""The group and, in a table of episodes, the agent that a baseline is for."""


@columns(
    reads=[PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=SAMPLED | fields(GREEDY),
    depends_on_options=route_changes,
    expand="rollout.n_and_greedy",
    groups="kept",
    early=EARLY_COLUMNS,
)
def generate_with_greedy(ctx: Context, table: pa.Table, *, rollout: RolloutConfig) -> pa.Table:
    """Sample as ``generate`` does, and add each prompt's greedy response, for which the column
    ``greedy`` is true.
    """
    samplings = [rollout_sampling(rollout)] * rollout.n + [greedy_sampling(rollout)]
    rows = sample_rows(ctx, table, samplings, routes=rollout.router_replay)
    is_greedy = np.arange(rows.num_rows) % (rollout.n + 1) == rollout.n
    return rows.append_column(GREEDY, pa.array(is_greedy, TYPES[GREEDY]))


@columns(
    reads=[GREEDY, REWARD, GROUP_ID],
    optional=EPISODE_COLUMNS,
    writes=fields(GREEDY_REWARD),
    new_rows=True,
    groups="kept",
)
def take_greedy_baselines(ctx: Context, table: pa.Table) -> pa.Table:
    """Give each sample its prompt's greedy reward as a baseline, and drop the greedy rows (ReMax,
    arXiv:2310.10505).

    The node needs complete groups, rows=GROUPED, and responses of ``generate_with_greedy``. The
    reward of a greedy episode is the sum of its rows'. ValueError for a group without a greedy
    response.
    """
    greedy = table.filter(table[GREEDY])
    rewards_of: dict[_BaselineKey, list[float | None]] = {}
    for key, reward in zip(_baseline_keys(greedy), greedy[REWARD].to_pylist(), strict=True):
        rewards_of.setdefault(key, []).append(reward)
    baselines: dict[_BaselineKey, float | None] = {}
    for key, rewards in rewards_of.items():
        valid = [reward for reward in rewards if reward is not None]
        baselines[key] = fsum(valid) if len(valid) == len(rewards) else None
    known_baselines = [reward for reward in baselines.values() if reward is not None]
    ctx.log("reward/greedy", known_baselines)
    sampled = table.filter(pc.invert(table[GREEDY]))
    keys = _baseline_keys(sampled)
    missing = sorted({group for group, agent in keys if (group, agent) not in baselines})
    if missing:
        raise ValueError(
            f"groups {missing[:5]} have no greedy response: generate with generate_with_greedy"
        )
    column = pa.array([baselines[key] for key in keys], TYPES[GREEDY_REWARD])
    return sampled.append_column(GREEDY_REWARD, column)


def _baseline_keys(table: pa.Table) -> list[_BaselineKey]:
    """Return the key of each row's baseline."""
    agents = [None] * table.num_rows
    if EPISODE_ID in table.column_names and AGENT in table.column_names:
        agents = table[AGENT].to_pylist()
    return list(zip(table[GROUP_ID].to_pylist(), agents, strict=True))
