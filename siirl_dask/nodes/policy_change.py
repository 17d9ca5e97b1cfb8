"""Measures how an update changed the policy, for agents that are updated one after the other
(HAPPO).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.algorithms import row_sums
from siirl_dask.context import Context
from siirl_dask.nodes.nonfinite import check_finite
from siirl_dask.nodes.packed_table import pack_rows, packed, response_mask, values
from siirl_dask.planner import ContractChanges, columns
from siirl_dask.schema import (
    AGENT,
    EPISODE_ID,
    IMAGES,
    OBSERVED_IMAGES,
    OLD_LOGPROBS,
    POLICY_CHANGE,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    TYPES,
    fields,
)
from siirl_dask.tables import rows_where
from siirl_dask.training import Trainer


def _reads(*, agents: tuple[str, ...], old: str, **options: object) -> ContractChanges:
    return ContractChanges(reads=(old, AGENT, EPISODE_ID) if agents else (old,))


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS],
    optional=[RESPONSE_MASK, POLICY_CHANGE, EPISODE_ID],
    if_written=[IMAGES, OBSERVED_IMAGES],
    writes=fields(POLICY_CHANGE),
    depends_on_options=_reads,
)
def measure_policy_change(
    ctx: Context,
    table: pa.Table,
    *,
    agents: tuple[str, ...] = (),
    old: str = OLD_LOGPROBS,
) -> pa.Table:
    """Add to each row's ``policy_change`` the change of the policy in its episode: the sum of log
    pi - log pi_old over the tokens of the rows that ``agents`` wrote, or of all rows where none is
    named.

    The node runs after an agent's update, with the rows of all agents, and before the next one's
    update, whose loss is ``happo_clip``. The changes by earlier updates are added. ``old`` is the
    column of log-probs under the policy before the update; where rows are of one step, the
    sampler's, ``rollout_logprobs``, save a pass. Where episodes have several rows the node needs
    complete groups: rows=GROUPED.
    """
    ctx.free_device()
    trainer: Trainer = ctx.resource
    is_own = np.ones(table.num_rows, np.bool_)
    if agents:
        is_own = np.isin(table[AGENT].to_pylist(), agents)
    rows = rows_where(table, is_own)
    mask, offsets = response_mask(rows)
    old_logprobs, _ = packed(rows[old])
    change = (trainer.logprobs(pack_rows(rows).rows).logprobs - old_logprobs) * mask
    own_rows = torch.from_numpy(is_own)
    row_changes = torch.zeros(table.num_rows, dtype=torch.float64)
    row_changes[own_rows] = row_sums(change.double(), offsets)
    total = _sums_of_episodes(table, row_changes)
    if POLICY_CHANGE in table.column_names:
        total = total + values(table[POLICY_CHANGE])
        table = table.drop_columns([POLICY_CHANGE])
    ctx.log("policy/change", total[own_rows].tolist())
    table = table.append_column(
        POLICY_CHANGE, pa.array(total.float().numpy(), TYPES[POLICY_CHANGE])
    )
    check_finite(ctx, table, POLICY_CHANGE)
    return table


def _sums_of_episodes(table: pa.Table, numbers: Tensor) -> Tensor:
    """Give each row the sum of the numbers of its episode's rows. [R] float64 -> [R]."""
    if EPISODE_ID not in table.column_names:
        return numbers
    _, inverse = np.unique(table[EPISODE_ID].to_numpy(), return_inverse=True)
    episode_of_row = torch.from_numpy(inverse.astype(np.int64))
    sums = torch.zeros(table.num_rows, dtype=torch.float64)  # there are no more episodes than rows
    sums.index_add_(0, episode_of_row, numbers)
    return sums[episode_of_row]
