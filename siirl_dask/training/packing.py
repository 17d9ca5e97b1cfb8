"""Rows packed one after the other for one pass through a model: no token of padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from siirl_dask.context import Rank
from siirl_dask.training.parallel.own_rows import TensorParallelRows
from siirl_dask.training.parallel.ulysses import Route
from siirl_dask.training.trainer import PackedRows

Ints = NDArray[np.int64]
Runs = tuple[tuple[int, int], ...]
"""``(count, length)`` of neighbouring sequences of equal length, in the order they are packed."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What attention is told of a pack. An object and no tuple: torch.compile would compile a layer again for every
    number of runs.
    """

    runs: Runs
    ranks: Rank | None = None
    """This rank among those that share the pack's tokens; None where none do."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R neighbouring rows of a batch, shortest first inside so that attention takes equal lengths in one call.

    Where ranks share tokens, T are this rank's of all that the micro-batch has and ``runs`` are of all; ``predicting``
    and ``targets`` are of the response tokens that T predict, whoever's; ``offsets`` and ``tokens`` of its own rows'.
    So they are where ranks go through all of it together (``own``), and T are all.
    """

    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64, from 0 in each row."""
    runs: Runs
    predicting: Tensor
    """[K] int64: place in T that predicts each response token; tokens in the batch's row order, not the packed one."""
    targets: Tensor
    """[K] int64: the response tokens."""
    offsets: Tensor
    """[R + 1] int64: row r owns response tokens ``offsets[r]`` to ``offsets[r + 1]`` of K."""
    tokens: slice
    """Where the K tokens lie among the response tokens of the whole batch."""
    route: Route | None = None
    """How scores come to the ranks whose rows they are of; None where every rank computes its own."""
    own_rows: TensorParallelRows | None = None
    """Where ranks go through the same micro-batch, which scores are of this rank's rows."""


def response_offsets(rows: PackedRows) -> Tensor:
    """[R + 1]: where each row's response tokens begin among those of all. ValueError if the rows make no sense."""
    lengths = rows.offsets.diff()
    if len(rows.offsets) != len(rows) + 1 or int(rows.offsets[-1]) != len(rows.tokens) or int(rows.offsets[0]) != 0:
        raise ValueError(f"{len(rows)} rows of {len(rows.tokens)} tokens do not have offsets {rows.offsets.tolist()}")
    if bool((rows.prompt_lengths < 1).any()) or bool((rows.prompt_lengths > lengths).any()):
        raise ValueError("expected every row to have at least one prompt token and no more of them than tokens")
    return torch.cat([torch.zeros(1, dtype=torch.int64), (lengths - rows.prompt_lengths).cumsum(0)])


def micro_batches(rows: PackedRows, budget: int) -> list[MicroBatch]:
    """Rows in their order, in as few as ``budget`` tokens in each allow, and those as even as they can be; a row that
    is longer goes alone.

    At least one: of no rows, an empty one.
    """
    response = response_offsets(rows)
    return [_pack(rows, response, start, stop) for start, stop in _cut(rows.offsets.numpy(), budget)]


def idle_batch(rows: PackedRows) -> MicroBatch:
    """One token that predicts nothing, to be gone through after the micro-batches of ``rows``."""
    responses = int(response_offsets(rows)[-1])
    none, token = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(
        input_ids=token,
        position_ids=token,
        runs=((1, 1),),
        predicting=none,
        targets=none,
        offsets=torch.zeros(1, dtype=torch.int64),
        tokens=slice(responses, responses),
    )


def _cut(offsets: Ints, budget: int) -> list[tuple[int, int]]:
    """First and last row of each micro-batch: with the smallest budget that needs no more of them."""
    cuts = _filled(offsets, budget)
    low, high = -(-int(offsets[-1]) // len(cuts)), budget
    while low < high:
        middle = (low + high) // 2
        if len(tried := _filled(offsets, middle)) <= len(cuts):
            cuts, high = tried, middle
        else:
            low = middle + 1
    return cuts


def _filled(offsets: Ints, budget: int) -> list[tuple[int, int]]:
    """Each has as many rows as there is room for, at least one."""
    cuts, start, rows = [], 0, len(offsets) - 1
    while start < rows:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + budget, side="right")) - 1)
        cuts.append((start, stop))
        start = stop
    return cuts or [(0, 0)]


def _pack(rows: PackedRows, response: Tensor, start: int, stop: int) -> MicroBatch:
    """Vectorised: thousands of short rows must not cost a loop."""
    begins, lengths = rows.offsets[start:stop], rows.offsets[start : stop + 1].diff()
    order = lengths.argsort(stable=True)
    packed_lengths = lengths[order]
    packed_begins = packed_lengths.cumsum(0) - packed_lengths
    positions = torch.arange(int(lengths.sum())) - packed_begins.repeat_interleave(packed_lengths)
    source = positions + begins[order].repeat_interleave(packed_lengths)

    offsets = response[start : stop + 1] - response[start]
    counts = offsets.diff()
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
    first = rows.prompt_lengths[start:stop].repeat_interleave(counts) + within
    place = torch.empty_like(begins).scatter_(0, order, packed_begins)
    return MicroBatch(
        input_ids=rows.tokens[source][None],
        position_ids=positions[None],
        runs=tuple((len(list(same)), length) for length, same in groupby(packed_lengths.tolist())),
        predicting=place.repeat_interleave(counts) + first - 1,
        targets=rows.tokens[begins.repeat_interleave(counts) + first],
        offsets=offsets,
        tokens=slice(int(response[start]), int(response[stop])),
    )
