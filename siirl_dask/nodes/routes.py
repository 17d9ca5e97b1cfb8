"""The column of routed experts (``rollout.router_replay``): what generate nodes write
there. ``packed_table`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from siirl_dask.config import RolloutConfig
from siirl_dask.errors import ConfigError, PeerError, counted
from siirl_dask.models.routing import Routing
from siirl_dask.rollout import RolloutEngine
from siirl_dask.rollout.engine import routing_of
from siirl_dask.rollout.requests import Sampled
from siirl_dask.schema import (
    PROMPT_IDS,
    ROUTED_EXPERTS,
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
