"""The column of routed experts (``rollout.router_replay``): what nodes that sample write there, and
what those that learn read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.config import RolloutConfig
from siirl_dask.errors import ConfigError, DataError, PeerError, counted
from siirl_dask.models.routing import Routing
from siirl_dask.nodes.packed_table import packed
from siirl_dask.rollout import RolloutEngine
from siirl_dask.rollout.engine import routing_of
from siirl_dask.rollout.requests import Sampled
from siirl_dask.schema import (
    PROMPT_IDS,
    RESPONSE_IDS,
    ROUTED_EXPERTS,
    ROW_ID,
    TYPES,
    DataType,
    fields,
)


def route_columns(rollout: RolloutConfig) -> Mapping[str, DataType]:
    """Return the columns that ``rollout.router_replay`` adds to those of a node that samples."""
    return fields(ROUTED_EXPERTS) if rollout.router_replay else {}


def add_routes(engine: RolloutEngine, rows: pa.Table, sampled: Sequence[Sampled]) -> pa.Table:
    """Add the samples' routes. PeerError for those of a peer that do not fit their row, ConfigError
    for an engine that records none.
    """
    routing = routing_of(engine)
    if routing is None:
        raise ConfigError(
            "rollout.router_replay=true, and the engine records no routes: give build_engine the "
            "same rollout"
        )
    prompts = rows[PROMPT_IDS].combine_chunks().value_lengths().to_pylist()
    routes = [
        _routes(sample, prompt + len(sample.generation.token_ids) - 1, routing)
        for prompt, sample in zip(prompts, sampled, strict=True)
    ]
    ends = np.cumsum([0, *map(len, routes)], dtype=np.int64)
    flat = np.concatenate([np.empty(0, np.uint8), *routes])
    column = pa.LargeListArray.from_arrays(
        pa.array(ends), pa.array(flat), type=TYPES[ROUTED_EXPERTS]
    )
    return rows.append_column(ROUTED_EXPERTS, column)


def _routes(sample: Sampled, tokens: int, routing: Routing) -> np.typing.NDArray[np.uint8]:
    """Return a sample's routes for the ``tokens`` tokens of prompt and response but the last.
    [tokens * W].
    """
    recorded = sample.generation.routes
    routes = np.frombuffer(b"" if recorded is None else recorded, np.uint8)
    if len(routes) != tokens * routing.width or (len(routes) and routes.max() >= routing.experts):
        raise PeerError(
            f"worker {sample.worker!r} sent routes of {len(routes)} bytes, up to expert "
            f"{max(routes, default=None)}: expected {routing.width} for each of "
            f"{counted(tokens, 'token')}, of {routing.experts} experts; does it sample with the "
            "same model and rollout.router_replay?"
        )
    return routes


def packed_routes(table: pa.Table) -> Tensor | None:
    """Return the experts of each token of the table's rows, -1 for the last of each, [T, W] int16;
    None without the column or rows.

    DataError for a row that has not as many for each of its tokens, but the last, as the others.
    """
    if ROUTED_EXPERTS not in table.column_names or not table.num_rows:
        return None
    if nulls := table[ROUTED_EXPERTS].null_count:
        rows = "1 row has" if nulls == 1 else f"{nulls} rows have"
        raise DataError(
            f"{rows} no {ROUTED_EXPERTS}: expected the experts of each token but the last"
        )
    flat, offsets = packed(table[ROUTED_EXPERTS])
    _, prompt_offsets = packed(table[PROMPT_IDS])
    _, response_offsets = packed(table[RESPONSE_IDS])
    token_offsets = prompt_offsets + response_offsets
    tokens = token_offsets.diff() - 1  # the last token of a row is never fed to the model
    experts = offsets.diff()
    width = int(experts[0]) // max(1, int(tokens[0]))
    wrong = (experts != width * tokens).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"row {table[ROW_ID][row].as_py()} has {int(experts[row])} {ROUTED_EXPERTS} for the "
            f"{int(tokens[row])} tokens before its last: expected {width} each, as in other rows"
        )
    routes = torch.full((int(token_offsets[-1]), width), -1, dtype=torch.int16)
    has_route = torch.ones(len(routes), dtype=torch.bool)
    has_route[token_offsets[1:] - 1] = False
    routes[has_route] = flat.view(-1, width).to(torch.int16)
    return routes
