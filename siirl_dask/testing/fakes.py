"""Roles and nodes that only move rows, for tests and measurements of the data plane."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Device, Rank, Reduce
from siirl_dask.planner import columns
from siirl_dask.schema import RESPONSE_IDS, TOKENS, TYPES, fields


def build_nothing(device: Device, rank: Rank) -> None:
    """A role that needs no model."""


@columns(writes=fields(RESPONSE_IDS), new_rows=True)
def fill(ctx: Context, table: pa.Table, *, tokens: int) -> pa.Table:
    """Give each row a response of ``tokens`` tokens that tell its row id and step."""
    first = table["row_id"].to_numpy() + 1000 * ctx.step
    values = (first[:, None] + np.arange(tokens)).astype(np.int32).reshape(-1)
    offsets = pa.array(np.arange(table.num_rows + 1, dtype=np.int32) * tokens)
    table = table.set_column(
        table.column_names.index(TOKENS), TOKENS, pa.array(np.full(table.num_rows, tokens), pa.int64())
    )
    return table.append_column(RESPONSE_IDS, pa.ListArray.from_arrays(offsets, values, type=TYPES[RESPONSE_IDS]))


@columns(reads=[RESPONSE_IDS])
def take(ctx: Context, table: pa.Table) -> pa.Table:
    """Read the responses and log how many there are and their sum, so that what arrived can be checked."""
    ctx.log("samples", table.num_rows, Reduce.SUM)
    ctx.log("taken/sum", float(table[RESPONSE_IDS].combine_chunks().flatten().to_numpy().sum()), Reduce.SUM)
    return table
