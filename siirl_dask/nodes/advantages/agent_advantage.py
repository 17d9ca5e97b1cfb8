"""Estimates advantages of rows that several agents wrote.

An episode one of whose rows has no reward gets no advantage and does not count in those of others.
TrainingError for an advantage that is not finite, unless ``run.on_nan=skip``.
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
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS
from siirl_dask.nodes.episodes.turn_table import agent_names, episode_rows, scored_episodes
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import scatter_valid, values
from siirl_dask.planner import ContractChanges, columns, reads_option
from siirl_dask.schema import ADVANTAGE, AGENT, GROUP_ID, REWARD, TYPES, fields


def _check_advantage(
    *, advantage: Callable[[AgentOutcomes], Tensor], proposal: str | None = None
) -> None:
    """Call the advantage with no rows, before the run begins. ValueError for a result of the
    wrong shape.
    """
    empty_ids = torch.zeros(0, dtype=torch.int64)
    outcomes = AgentOutcomes(
        rows=EpisodeRows.empty(),
        rewards=torch.zeros(0),
        proposals=None if proposal is None else empty_ids,
    )
    advantages = advantage(outcomes)
    if advantages.shape != (0,):
        raise ValueError(f"advantages have shape {list(advantages.shape)}: expected [0]")


def _learns_alone(
    *, advantage: Callable[[AgentOutcomes], Tensor], proposal: str | None = None
) -> bool:
    """Return whether a single episode of a prompt can get an advantage other than 0.

    False for an advantage that compares the episodes of a prompt: one of reward 0 that is alone in
    its group gets 0.
    """
    prompts = torch.arange(2)
    apart = advantage(_two_episodes(prompts, advantage, proposal))
    together = advantage(_two_episodes(torch.zeros_like(prompts), advantage, proposal))
    if torch.equal(apart, together):
        return True
    return bool(apart[0] != 0)


def _two_episodes(
    group_ids: Tensor, advantage: Callable[[AgentOutcomes], Tensor], proposal: str | None
) -> AgentOutcomes:
    """Return two episodes of one agent; it is the proposer where ``advantage`` has an option of
    that name.
    """
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


def _reads_proposal(*, proposal: str | None, **options: object) -> ContractChanges:
    return ContractChanges(reads=() if proposal is None else (proposal,))


@columns(
    reads=[REWARD, GROUP_ID, AGENT],
    optional=EPISODE_COLUMNS,
    writes=fields(ADVANTAGE),
    depends_on_options=_reads_proposal,
    trial=_check_advantage,
    learns_alone=_learns_alone,
)
def estimate_agent_advantages(
    ctx: Context,
    table: pa.Table,
    *,
    advantage: Callable[[AgentOutcomes], Tensor],
    proposal: str | None = None,
) -> pa.Table:
    """Add one advantage a row, from ``advantage(AgentOutcomes) -> [R]``. The node needs complete
    groups: rows=GROUPED.

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
    advantages = pa.array(advantage(outcomes).numpy(), TYPES[ADVANTAGE])
    return _add_advantage(ctx, table, scatter_valid(comparable, advantages))


@columns(
    reads=[REWARD, GROUP_ID],
    optional=EPISODE_COLUMNS,
    writes=fields(ADVANTAGE),
    stateful=True,
    depends_on_options=reads_option("by"),
)
def estimate_role_advantages(
    ctx: Context, table: pa.Table, *, by: tuple[str, ...] = (AGENT,)
) -> pa.Table:
    """Add one advantage a row: its part's reward minus the running baseline of its role (RAE,
    arXiv:2506.24119).

    The node needs complete groups, rows=GROUPED, and a role built by ``build_role_baselines``. The
    columns ``by`` make a role, such as the agent, or game and agent; in SPIRAL both. All rows of a
    step are compared with the baselines before the step. Then the baselines are updated with the
    parts of all workers, in the order of row ids, so that they are the same on any number of
    workers. SPIRAL updates a baseline with a reward before it subtracts the baseline, which shrinks
    the advantage to ``decay`` times this one.
    """
    role_baselines: RoleBaselines = ctx.resource
    comparable = scored_episodes(table)
    scored = table.filter(comparable)
    rows = episode_rows(scored)
    rewards = values(scored[REWARD]).tolist()
    columns_of_role = scored.select(list(by)).to_pylist()
    parts = list(rows.members().values())
    totals = []
    roles = []
    for part in parts:
        totals.append(sum(rewards[row] for row in part))
        values_of_role = columns_of_role[part[0]].values()
        roles.append(" ".join(str(value) for value in values_of_role))
    row_advantages = [0.0] * scored.num_rows
    for part, advantage in zip(parts, role_baselines.advantages(totals, roles), strict=True):
        for row in part:
            row_advantages[row] = advantage
    column = pa.array(row_advantages, TYPES[ADVANTAGE])
    table = _add_advantage(ctx, table, scatter_valid(comparable, column))
    own_rewards: list[tuple[int, str, float]] = []
    for part, role, total in zip(parts, roles, totals, strict=True):
        if isfinite(total):
            own_rewards.append((int(rows.row_ids[part[0]]), role, total))
    all_rewards: list[tuple[int, str, float]] = []
    for message in ctx.all_gather(json.dumps(own_rewards).encode()):
        all_rewards += _read_parts(message)
    role_baselines.update((role, reward) for _, role, reward in sorted(all_rewards))
    if ctx.rank.rank == 0:
        for role, baseline in role_baselines.baselines.items():
            ctx.log(f"baseline/{role}", baseline)
    return table


def _add_advantage(ctx: Context, table: pa.Table, advantage: pa.Array) -> pa.Table:
    table = table.append_column(ADVANTAGE, advantage)
    check_finite(ctx, table, ADVANTAGE)
    return table


def _read_parts(message: bytes) -> Sequence[tuple[int, str, float]]:
    """Return row id, role and reward of each part in a worker's message. PeerError for any other
    message.
    """
    try:
        parts = json.loads(message)
    except ValueError as error:
        raise PeerError("received rewards of roles that are no JSON") from error
    if not isinstance(parts, list) or not all(map(_is_part, parts)):
        raise PeerError(
            "received rewards of roles: expected a list of row id, role and finite reward"
        )
    return [(row, role, float(reward)) for row, role, reward in parts]


def _is_part(part: object) -> bool:
    match part:
        case [int(), str(), float() | int() as reward]:
            return isfinite(reward)
    return False
