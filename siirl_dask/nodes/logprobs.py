"""Log-probabilities of what was sampled, under the policy or a reference."""

from __future__ import annotations

import pyarrow as pa

from siirl_dask.context import Context
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.planner import columns
from siirl_dask.schema import OLD_LOGPROBS, PROMPT_IDS, REFERENCE_LOGPROBS, RESPONSE_IDS, TYPES, VALUES, fields
from siirl_dask.training import Critic, Trainer


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(OLD_LOGPROBS))
def policy_logprobs(ctx: Context, table: pa.Table) -> pa.Table:
    """Under the policy as it is before this step's update."""
    return _logprobs(ctx, table, OLD_LOGPROBS)


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(REFERENCE_LOGPROBS))
def reference_logprobs(ctx: Context, table: pa.Table) -> pa.Table:
    """Under the reference policy."""
    return _logprobs(ctx, table, REFERENCE_LOGPROBS)


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(REFERENCE_LOGPROBS), requires=["adapters"])
def base_logprobs(ctx: Context, table: pa.Table) -> pa.Table:
    """Under the policy without its adapters (``trainer.lora.rank``): as it was at the start, and so a reference that
    takes no model of its own.
    """
    return _logprobs(ctx, table, REFERENCE_LOGPROBS, base=True)


def _logprobs(ctx: Context, table: pa.Table, column: str, *, base: bool = False) -> pa.Table:
    ctx.free_device()
    trainer: Trainer = ctx.resource
    packed = pack_rows(table)
    scores = trainer.base_logprobs(packed.rows) if base else trainer.logprobs(packed.rows)
    return table.append_column(column, packed.per_token(scores.logprobs, TYPES[column]))


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(VALUES))
def estimate_values(ctx: Context, table: pa.Table) -> pa.Table:
    """Before each response token, under the critic as it is before this step's update."""
    ctx.free_device()
    critic: Critic = ctx.resource
    packed = pack_rows(table)
    return table.append_column(VALUES, packed.per_token(critic.values(packed.rows), TYPES[VALUES]))
