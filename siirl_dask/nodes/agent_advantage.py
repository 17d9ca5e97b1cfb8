"""Estimates advantages of rows that several agents wrote.

An episode one of whose rows has no reward gets no advantage and does not count in those of others. TrainingError for an
advantage that is not finite, unless ``run.on_nan=skip``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.algorithms import AgentOutcomes, EpisodeRows, RoleBaselines
from siirl_dask.context import Context
from siirl_dask.errors import PeerError
from siirl_dask.nodes.episodes import EPISODE_COLUMNS
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import scatter_valid, values
from siirl_dask.nodes.turn_table import agent_names, episode_rows, scored_episodes
from siirl_dask.planner import Changes, columns, reads_option
from siirl_dask.schema import ADVANTAGE, AGENT, GROUP_ID, REWARD, TYPES, fields


def _try(*, advantage: Callable[[AgentOutcomes], Tensor], proposal: str | None = None) -> None:
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    rows = EpisodeRows(row_ids=ids, group_ids=ids, episode_ids=ids, agents=ids, parts=ids)
    given = advantage(AgentOutcomes(rows=rows, rewards=none, proposals=None if proposal is None else ids))
    if given.shape != (0,):
        raise ValueError(f"advantages have shape {list(given.shape)}: expected [0]")


def _learns_alone(*, advantage: Callable[[AgentOutcomes], Tensor], proposal: str | None = None) -> bool:
    """Return False for an advantage that compares a prompt's episodes: beside no other, one of reward 0 has 0."""
    prompts = torch.arange(2)
    apart = advantage(_two_episodes(prompts, advantage, proposal))
    together = advantage(_two_episodes(torch.zeros_like(prompts), advantage, proposal))
    if torch.equal(apart, together):
        return True
    return bool(apart[0] != 0)


def _two_episodes(
    group_ids: Tensor, advantage: Callable[[AgentOutcomes], Tensor], proposal: str | None
) -> AgentOutcomes:
    """Return two episodes of one agent; it is the proposer where ``advantage`` asks for one."""
    options = advantage.keywords if isinstance(advantage, partial) else {}
    numbers = torch.arange(2)
    rows = EpisodeRows(
        row_ids=numbers,
        group_ids=group_ids,
        episode_ids=numbers,
        agents=torch.zeros_like(numbers),
        parts=numbers,
    )
    return AgentOutcomes(
        rows=rows,
        rewards=torch.tensor([0.0, 1.0]),
        names=(options.get("proposer", ""),),
        proposals=None if proposal is None else numbers,
    )


def _reads_proposal(*, proposal: str | None, **options: object) -> Changes:
    return Changes(reads=() if proposal is None else (proposal,))


@columns(
    reads=[REWARD, GROUP_ID, AGENT],
    optional=EPISODE_COLUMNS,
    writes=fields(ADVANTAGE),
    depends_on_options=_reads_proposal,
    trial=_try,
    learns_alone=_learns_alone,
)
def estimate_agent_advantages(
    ctx: Context, table: pa.Table, *, advantage: Callable[[AgentOutcomes], Tensor], proposal: str | None = None
) -> pa.Table:
    """Add one advantage a row, from ``advantage(AgentOutcomes) -> [R]``. The node asks for rows=GROUPED.

    ``proposal`` names a column of whole numbers: the proposal that each row is, or answers.
    """
    comparable = scored_episodes(table)
    scored = table.filter(comparable)
    names, _ = agent_names(scored)
    outcomes = AgentOutcomes(
        rows=episode_rows(scored),
        rewards=values(scored[REWARD]),
        names=names,
        proposals=None if proposal is None else values(scored[proposal]).long(),
    )
    return _with_advantage(
        ctx, table, scatter_valid(comparable, pa.array(advantage(outcomes).numpy(), TYPES[ADVANTAGE]))
    )


@columns(
    reads=[REWARD, GROUP_ID],
    optional=EPISODE_COLUMNS,
    writes=fields(ADVANTAGE),
    stateful=True,
    depends_on_options=reads_option("by"),
)
def estimate_role_advantages(ctx: Context, table: pa.Table, *, by: tuple[str, ...] = (AGENT,)) -> pa.Table:
    """Add one advantage a row: its part's reward minus the running baseline of its role (RAE, arXiv:2506.24119).

    The node asks for rows=GROUPED, and for a role built by ``build_role_baselines``. A role is what the columns ``by``
    say, such as the agent, or game and agent; in SPIRAL both. All rows of a step are compared with the baselines before
    it; then these take in the parts of all workers, in the order of row ids, so that they are the same on any number of
    workers. SPIRAL takes a reward in before it subtracts, which shrinks the advantage to ``decay`` times this one.
    """
    held: RoleBaselines = ctx.resource
    comparable = scored_episodes(table)
    scored = table.filter(comparable)
    rows, rewards = episode_rows(scored), values(scored[REWARD]).tolist()
    keys = [" ".join(str(key) for key in row.values()) for row in scored.select([*by]).to_pylist()]
    members = list(rows.members().values())
    first = [int(rows.row_ids[part[0]]) for part in members]
    roles, totals = [keys[part[0]] for part in members], [sum(rewards[row] for row in part) for part in members]
    given = [0.0] * scored.num_rows
    for part, advantage in zip(members, held.advantages(totals, roles), strict=True):
        for row in part:
            given[row] = advantage
    table = _with_advantage(ctx, table, scatter_valid(comparable, pa.array(given, TYPES[ADVANTAGE])))
    own = [part for part in zip(first, roles, totals, strict=True) if isfinite(part[2])]
    everyone = [part for message in ctx.all_gather(json.dumps(own).encode()) for part in _read_parts(message)]
    held.update((role, reward) for _, role, reward in sorted(everyone))
    if ctx.rank.rank == 0:
        for role, baseline in held.baselines.items():
            ctx.log(f"baseline/{role}", baseline)
    return table


def _with_advantage(ctx: Context, table: pa.Table, advantage: pa.Array) -> pa.Table:
    table = table.append_column(ADVANTAGE, advantage)
    check_finite(ctx, table, ADVANTAGE)
    return table


def _read_parts(message: bytes) -> Sequence[tuple[int, str, float]]:
    """Return row id, role and reward of each part in a worker's message. PeerError where it holds something else."""
    try:
        parts = json.loads(message)
    except ValueError as error:
        raise PeerError("received rewards of roles that are no JSON") from error
    if not isinstance(parts, list) or not all(map(_is_part, parts)):
        raise PeerError("received rewards of roles: expected a list of row id, role and finite reward")
    return [(row, role, float(reward)) for row, role, reward in parts]


def _is_part(part: object) -> bool:
    match part:
        case [int(), str(), float() | int() as reward]:
            return isfinite(reward)
    return False
