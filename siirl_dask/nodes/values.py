"""What the critic foresees of what was sampled."""

from __future__ import annotations

import pyarrow as pa

from siirl_dask.context import Context
from siirl_dask.nodes.packing import pack_rows
from siirl_dask.nodes.room import make_room
from siirl_dask.planner import columns
from siirl_dask.schema import PROMPT_IDS, RESPONSE_IDS, TYPES, VALUES, fields
from siirl_dask.training import Critic


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(VALUES))
def estimate_values(ctx: Context, table: pa.Table) -> pa.Table:
    """Before each response token, under the critic as it is before this step's update."""
    make_room(ctx)
    critic: Critic = ctx.resource
    packed = pack_rows(table)
    return table.append_column(VALUES, packed.per_token(critic.values(packed.rows), TYPES[VALUES]))
