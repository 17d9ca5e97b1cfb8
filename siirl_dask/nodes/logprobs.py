"""Scores sampled responses: log-probs under the policy or a reference, values under a critic.

TrainingError for numbers that are not finite, unless ``run.on_nan=skip``.
"""

from __future__ import annotations

import pyarrow as pa

from siirl_dask.context import Context
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import PackedTable, pack_rows
from siirl_dask.nodes.routes import packed_routes
from siirl_dask.planner import ContractChanges, columns
from siirl_dask.schema import (
    COLLISION_PROBS,
    ENTROPIES,
    IMAGES,
    OBSERVED_IMAGES,
    OLD_LOGPROBS,
    PROMPT_IDS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    ROUTED_EXPERTS,
    TYPES,
    VALUES,
    fields,
)
from siirl_dask.training import Critic, TokenScores, Trainer


def _writes_scores(*, entropies: bool, collision_probs: bool) -> ContractChanges:
    writes: dict[str, pa.DataType] = {}
    if entropies:
        writes |= fields(ENTROPIES)
    if collision_probs:
        writes |= fields(COLLISION_PROBS)
    return ContractChanges(writes=writes)


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS],
    if_written=[IMAGES, OBSERVED_IMAGES, ROUTED_EXPERTS],
    writes=fields(OLD_LOGPROBS),
    depends_on_options=_writes_scores,
)
def policy_logprobs(
    ctx: Context,
    table: pa.Table,
    *,
    entropies: bool = False,
    collision_probs: bool = False,
) -> pa.Table:
    """Add the log-probs under the policy before this step's update; with ``rollout.router_replay``
    tokens are routed to the experts that the engine used.

    With ``entropies`` also add the entropy at each response token, and with ``collision_probs`` the
    sum of squared probabilities, both of the same forward pass.
    """
    ctx.free_device()
    trainer: Trainer = ctx.resource
    packed = pack_rows(table, packed_routes(table))
    scores = trainer.logprobs(packed.rows)
    table = _add_logprobs(ctx, table, packed, scores, OLD_LOGPROBS)
    if entropies:
        table = table.append_column(ENTROPIES, packed.per_token(scores.entropy, TYPES[ENTROPIES]))
    if collision_probs:
        table = table.append_column(
            COLLISION_PROBS, packed.per_token(scores.collision, TYPES[COLLISION_PROBS])
        )
    return table


@columns(reads=[ROLLOUT_LOGPROBS], writes=fields(OLD_LOGPROBS))
def rollout_logprobs(ctx: Context, table: pa.Table) -> pa.Table:
    """Use the engine's log-probs as those before the update, which saves the policy a forward pass.

    The ratio of the loss is then that of the policy to the sampler itself, as in PPO
    (arXiv:1707.06347), whatever makes the two differ: rounding, or the age of the weights.
    """
    return _add_finite(ctx, table, OLD_LOGPROBS, table[ROLLOUT_LOGPROBS])


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS],
    if_written=[IMAGES, OBSERVED_IMAGES],
    writes=fields(REFERENCE_LOGPROBS),
)
def reference_logprobs(ctx: Context, table: pa.Table) -> pa.Table:
    """Add the log-probs under the reference policy."""
    ctx.free_device()
    trainer: Trainer = ctx.resource
    packed = pack_rows(table)
    return _add_logprobs(ctx, table, packed, trainer.logprobs(packed.rows), REFERENCE_LOGPROBS)


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS],
    if_written=[IMAGES, OBSERVED_IMAGES],
    writes=fields(REFERENCE_LOGPROBS),
    requires=["adapters"],
)
def base_logprobs(ctx: Context, table: pa.Table) -> pa.Table:
    """Add the log-probs under the policy without its adapters: a reference that needs no second
    model.

    The policy needs adapters (``trainer.lora.rank``).
    """
    ctx.free_device()
    trainer: Trainer = ctx.resource
    packed = pack_rows(table)
    return _add_logprobs(ctx, table, packed, trainer.base_logprobs(packed.rows), REFERENCE_LOGPROBS)


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS],
    if_written=[IMAGES, OBSERVED_IMAGES],
    writes=fields(REFERENCE_LOGPROBS),
    requires=["averages"],
)
def average_logprobs(ctx: Context, table: pa.Table) -> pa.Table:
    """Add the log-probs under the moving average of the policy's weights: a reference that follows
    the policy (TR-DPO, arXiv:2404.09656), and needs no second model.

    The policy needs an average (``trainer.ema_decay``, ``trainer.ema_every``).
    """
    ctx.free_device()
    trainer: Trainer = ctx.resource
    packed = pack_rows(table)
    return _add_logprobs(
        ctx, table, packed, trainer.average_logprobs(packed.rows), REFERENCE_LOGPROBS
    )


def _add_logprobs(
    ctx: Context,
    table: pa.Table,
    packed: PackedTable,
    scores: TokenScores,
    column: str,
) -> pa.Table:
    return _add_finite(ctx, table, column, packed.per_token(scores.logprobs, TYPES[column]))


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS],
    if_written=[IMAGES, OBSERVED_IMAGES],
    writes=fields(VALUES),
)
def estimate_values(ctx: Context, table: pa.Table) -> pa.Table:
    """Add the value before each response token, under the critic before this step's update."""
    ctx.free_device()
    critic: Critic = ctx.resource
    packed = pack_rows(table)
    values = packed.per_token(critic.values(packed.rows), TYPES[VALUES])
    return _add_finite(ctx, table, VALUES, values)


def _add_finite(
    ctx: Context,
    table: pa.Table,
    name: str,
    column: pa.Array | pa.ChunkedArray,
) -> pa.Table:
    """Add a column whose numbers must be finite."""
    table = table.append_column(name, column)
    check_finite(ctx, table, name)
    return table
