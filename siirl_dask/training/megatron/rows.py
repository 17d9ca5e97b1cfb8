"""Puts together the rows of all ranks of a replica, which compute each of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from siirl_dask.training.megatron.grid import RankGrid
from siirl_dask.training.packing import response_offsets
from siirl_dask.training.trainer import Batch, EpisodeSpans, PackedRows

B = TypeVar("B", bound=Batch)


def joined_rows(rows: PackedRows, grid: RankGrid) -> tuple[PackedRows, slice]:
    """Return the rows of the replica's ranks, in their order, and where the response tokens of this
    rank's are among theirs. All ranks must call. ValueError for rows that show images.
    """
    if rows.images is not None and any(rows.images.groups):
        raise ValueError("the rows show images, and trainer.backend=megatron sees none")
    parts = grid.gather(replace(rows, images=None))
    counts = [int(response_offsets(part)[-1]) for part in parts]
    first = sum(counts[: grid.in_replica])
    return _rows(parts), slice(first, first + counts[grid.in_replica])


def joined_batch(batch: B, grid: RankGrid) -> tuple[B, slice]:
    """Return the batch of all of the replica's ranks, and where this rank's rows are in it. All
    ranks must call.
    """
    if batch.rows.images is not None:
        batch = replace(batch, rows=replace(batch.rows, images=None))
    parts = grid.gather(batch)
    counts = [len(part.rows) for part in parts]
    first = sum(counts[: grid.in_replica])
    joined: dict[str, Any] = {
        field.name: _join([getattr(part, field.name) for part in parts]) for field in fields(batch)
    }
    if any(part.mask is not None for part in parts):
        joined["mask"] = torch.cat([_mask(part) for part in parts])
    return replace(batch, **joined), slice(first, first + counts[grid.in_replica])


def _join(values: Sequence[Any]) -> Any:
    one = values[0]
    if any(type(value) is not type(one) for value in values):
        return None  # masks alone, which are joined with what their absence means
    if isinstance(one, PackedRows):
        return _rows(values)
    if isinstance(one, EpisodeSpans):
        return EpisodeSpans(
            torch.cat([each.starts for each in values]),
            torch.cat([each.lengths for each in values]),
        )
    if isinstance(one, Mapping):
        return {name: torch.cat([each[name] for each in values]) for name in one}
    if one is None:
        return None
    return torch.cat(list(values))


def _rows(parts: Sequence[PackedRows]) -> PackedRows:
    lengths = torch.cat([part.offsets.diff() for part in parts])
    # a rank without rows may have none
    routes = [part.routes for part in parts if part.routes is not None]
    return PackedRows(
        torch.cat([part.tokens for part in parts]),
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        torch.cat([part.prompt_lengths for part in parts]),
        routes=torch.cat(routes) if routes else None,
    )


def _mask(batch: Batch) -> Tensor:
    if batch.mask is not None:
        return batch.mask
    return torch.ones(int(response_offsets(batch.rows)[-1]), dtype=torch.bool)
