"""Samples responses: n for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context
from siirl_dask.nodes.continued.partial_rollout import (
    generate_partial,
    pack_unfinished,
    unpack_unfinished,
)
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.nodes.routes import add_routes, route_columns
from siirl_dask.nodes.sampling import (
    EARLY_COLUMNS,
    SAMPLED,
    add_samples,
    generate_all,
    make_requests,
    rollout_sampling,
)
from siirl_dask.planner import ContractChanges, Groups, KeptRows, columns
from siirl_dask.rollout import RolloutEngine, Sampling
from siirl_dask.schema import IMAGES, PROMPT_IDS, TOKEN_VERSIONS, TOKENS, TYPES, fields


def _generate_changes(*, rollout: RolloutConfig, **options: object) -> ContractChanges:
    if not rollout.continues_rows:
        changes = route_changes(rollout=rollout)
        if not rollout.in_flight:
            return changes
        return replace(changes, writes={**changes.writes, **fields(TOKEN_VERSIONS)}, in_flight=True)
    return ContractChanges(
        writes=fields(TOKEN_VERSIONS),
        carries=KeptRows(pack_unfinished, unpack_unfinished),
        groups=Groups.NEW,  # some are of earlier steps
        in_flight=rollout.in_flight,
    )


def route_changes(*, rollout: RolloutConfig, **options: object) -> ContractChanges:
    return ContractChanges(writes=route_columns(rollout))


@columns(
    reads=[PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=SAMPLED,
    depends_on_options=_generate_changes,
    expand="rollout.rows_per_prompt",
    groups="kept",
    early=EARLY_COLUMNS,
)
def generate(ctx: Context, table: pa.Table, *, rollout: RolloutConfig) -> pa.Table:
    """Sample ``rollout.n`` responses to each prompt, which may show images.

    Sample k of the prompt at position p is row ``p * n + k`` of group p. With ``rollout.partial``
    or ``rollout.window`` the rows are those of the groups that are complete by now, from this step
    and from earlier ones: see ``partial_rollout.py``. With ``rollout.in_flight`` a row goes on with
    new weights as soon as they are there, and ``token_versions`` has the version of each token.
    """
    if rollout.continues_rows:
        return generate_partial(ctx, table, rollout)
    samplings = [rollout_sampling(rollout)] * rollout.n
    return sample_rows(
        ctx, table, samplings, routes=rollout.router_replay, versions=rollout.in_flight
    )


def sample_rows(
    ctx: Context,
    table: pa.Table,
    samplings: Sequence[Sampling],
    *,
    routes: bool = False,
    versions: bool = False,
) -> pa.Table:
    """Return a row for each of ``samplings`` of each prompt; with ``routes`` and ``versions`` with
    the columns of ``rollout.router_replay`` and ``rollout.in_flight``.
    """
    rows, requests = make_requests(ctx, table, samplings)
    sampled = generate_all(ctx, requests, rows[TOKENS].to_pylist(), rows)
    rows = add_samples(ctx, rows, sampled)
    if routes:
        rows = add_routes(ctx.resource, rows, sampled)
    if versions:
        engine: RolloutEngine = ctx.resource
        token_versions = [sample.generation.versions_or(engine.version) for sample in sampled]
        column = pa.array(token_versions, TYPES[TOKEN_VERSIONS])
        rows = rows.append_column(TOKEN_VERSIONS, column)
    return rows
