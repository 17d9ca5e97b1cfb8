"""Samples responses: n for each prompt, the same with a greedy one added, or those of a
validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from siirl_dask.config import RolloutConfig, ValidationConfig
from siirl_dask.context import Context
from siirl_dask.nodes.partial_rollout import generate_partial, pack_unfinished, unpack_unfinished
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.nodes.routes import add_routes, route_columns
from siirl_dask.nodes.sampling import (
    EARLY_COLUMNS,
    SAMPLED,
    add_samples,
    generate_all,
    make_requests,
)
from siirl_dask.planner import ContractChanges, Groups, KeptRows, columns
from siirl_dask.rollout import RolloutEngine, Sampling
from siirl_dask.schema import GREEDY, IMAGES, PROMPT_IDS, TOKEN_VERSIONS, TOKENS, TYPES, fields


def _pack(ctx: Context, **options: object) -> pa.Table:
    return pack_unfinished(ctx)


def _unpack(ctx: Context, table: pa.Table, *, rollout: RolloutConfig, **options: object) -> None:
    unpack_unfinished(ctx, table, [rollout_sampling(rollout)] * rollout.n)


def _generate_changes(*, rollout: RolloutConfig, **options: object) -> ContractChanges:
    if not rollout.continues_rows:
        changes = _route_changes(rollout=rollout)
        if not rollout.in_flight:
            return changes
        return replace(changes, writes={**changes.writes, **fields(TOKEN_VERSIONS)}, in_flight=True)
    unfinished_rows = KeptRows(_pack, _unpack)
    return ContractChanges(
        writes=fields(TOKEN_VERSIONS),
        carries=unfinished_rows,
        groups=Groups.NEW,  # some are of earlier steps
        in_flight=rollout.in_flight,
    )


def _route_changes(*, rollout: RolloutConfig, **options: object) -> ContractChanges:
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
    samplings = [rollout_sampling(rollout)] * rollout.n
    if rollout.continues_rows:
        return generate_partial(ctx, table, samplings, rollout)
    return _generate(
        ctx, table, samplings, routes=rollout.router_replay, versions=rollout.in_flight
    )


@columns(
    reads=[PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=SAMPLED | fields(GREEDY),
    depends_on_options=_route_changes,
    expand="rollout.n_and_greedy",
    groups="kept",
    early=EARLY_COLUMNS,
)
def generate_with_greedy(ctx: Context, table: pa.Table, *, rollout: RolloutConfig) -> pa.Table:
    """Sample as ``generate`` does, and add each prompt's greedy response, for which the column
    ``greedy`` is true.
    """
    samplings = [rollout_sampling(rollout)] * rollout.n + [_greedy_sampling(rollout)]
    rows = _generate(ctx, table, samplings, routes=rollout.router_replay)
    is_greedy = np.arange(rows.num_rows) % (rollout.n + 1) == rollout.n
    return rows.append_column(GREEDY, pa.array(is_greedy, TYPES[GREEDY]))


@columns(
    reads=[PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=SAMPLED,
    expand="validation.n",
    groups="kept",
    early=EARLY_COLUMNS,
)
def generate_answers(
    ctx: Context,
    table: pa.Table,
    *,
    rollout: RolloutConfig,
    validation: ValidationConfig,
) -> pa.Table:
    """Sample ``validation.n`` responses to each prompt as ``validation`` says, numbered as those
    of ``generate``.
    """
    return _generate(ctx, table, [validation_sampling(rollout, validation)] * validation.n)


def validation_sampling(rollout: RolloutConfig, validation: ValidationConfig) -> Sampling:
    """Return the sampling parameters of ``generate_answers``; the default temperature is 0 for
    one sample, else 1.
    """
    temperature = validation.temperature
    if temperature is None:
        temperature = 0.0 if validation.n == 1 else 1.0
    return replace(_greedy_sampling(rollout), temperature=temperature, top_p=validation.top_p)


def rollout_sampling(rollout: RolloutConfig) -> Sampling:
    """Return the sampling parameters of ``generate``."""
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def _greedy_sampling(rollout: RolloutConfig) -> Sampling:
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=0.0,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def _generate(
    ctx: Context,
    table: pa.Table,
    samplings: Sequence[Sampling],
    *,
    routes: bool = False,
    versions: bool = False,
) -> pa.Table:
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
