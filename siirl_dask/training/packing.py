"""Micro-batches: rows packed one after the other for one pass through a model, without padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from siirl_dask.context import Rank
from siirl_dask.devices.operators import AUTO
from siirl_dask.training.batch_images import BatchImages, ImageInputs
from siirl_dask.training.parallel.own_rows import TensorParallelRows
from siirl_dask.training.parallel.ulysses import Route
from siirl_dask.training.shared_prompts import SharedPrompts, find_shared, same_prompts
from siirl_dask.training.trainer import PackedRows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Ints = NDArray[np.int64]
_CURRENT = "siirl_packing"  # attribute of modules
Runs = tuple[tuple[int, int], ...]
"""``(count, length)`` of neighbouring rows of equal length, in packed order."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Row lengths of a micro-batch, for attention. No tuple: torch.compile would recompile for
    each number of runs.
    """

    runs: Runs
    ranks: Rank | None = None
    """Rank of this process in its sequence-parallel group; None without one."""
    ends: Tensor | None = None
    """[R + 1] int32 on the device, cu_seqlens of the kernels. It is made once for all layers, since
    each copy to a device waits for the device. None on a CPU, where attention needs none."""
    masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """FlexAttention's masks by window, which the first layer makes for all."""
    library: str = AUTO
    """Library of the attention kernel: see ``devices/operators.py``."""
    shared: SharedPrompts | None = None
    """Prompts that rows share, on the device; ``runs`` and ``ends`` are of whole rows. None: no
    row shares any."""
    routes: Tensor | None = None
    """[T, W] int64 on the device, see ``PackedRows.routes``."""


class CurrentPacking:
    """The packing of the pass that a model is in, where its layers find it: a model hands its
    arguments on to few of its layers.

    A layer that is computed again in the backward pass finds the same packing, since each
    micro-batch's backward pass follows its forward pass.
    """

    packing: Packing | None = None
    """None outside of a pass over packed rows."""

    def share_with(self, modules: Iterable[nn.Module]) -> None:
        """Let ``packing_of`` find this for each module."""
        for module in modules:
            vars(module)[_CURRENT] = self


def packing_of(module: nn.Module) -> Packing | None:
    """Return the packing of the pass under way through a module; None outside of a pass over
    packed rows.
    """
    current = vars(module).get(_CURRENT)
    return None if current is None else current.packing


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Neighbouring rows of a batch, packed shortest first so that attention takes equal lengths in
    one call.

    Where rows share prompts, the T tokens are those that are computed, and ``runs`` are of the
    whole rows. A rank's own R rows have K response tokens. Sequence- and tensor-parallel ranks cut
    the rows of their whole group into micro-batches together. So the fields are of these rows:

    Alone
        All fields are of the rank's own rows.
    Sequence-parallel, n ranks
        ``input_ids`` and ``position_ids`` [T] are 1/n of the group's tokens, ``predicting`` and
        ``targets`` [C] what these predict. ``runs`` are the group's rows, ``offsets`` and
        ``tokens`` the rank's own. ``route`` sends scores [C] to the ranks that own them, [K].
    Tensor-parallel
        All fields but ``offsets`` and ``tokens``, which are of the rank's own rows, are of the
        group's rows. ``own_rows`` selects the rank's own scores [K] from those of the group [C].
    """

    input_ids: Tensor
    """[1, T] int64, in packed order; where prompts are shared, all of these first."""
    position_ids: Tensor
    """[1, T] int64, from 0 in each row; where rows show images [4, 1, T], with those in time,
    height and width."""
    runs: Runs
    predicting: Tensor
    """[C] int64. Index in T of the token that predicts each response token; in the batch's row
    order, not packed."""
    targets: Tensor
    """[C] int64, the response tokens."""
    offsets: Tensor
    """[R + 1] int64. Row r has response tokens ``offsets[r]`` to ``offsets[r + 1]`` of K."""
    tokens: slice
    """Position of the K tokens among the response tokens of the whole batch."""
    route: Route | None = None
    """All-to-all that takes scores to the ranks that own the rows; None without sequence
    parallelism."""
    own_rows: TensorParallelRows | None = None
    """Selection of this rank's rows from scores that the whole group computes; None without
    tensor parallelism."""
    shared: SharedPrompts | None = None
    """Prompts that rows share, each of which is computed once; None where all tokens are of one
    row."""
    images: BatchImages | None = None
    """Images that the rows show, each once; None without any."""
    routes: Tensor | None = None
    """[T, W] int16, see ``PackedRows.routes``. Prompts that are shared have the same in all
    their rows."""


def response_offsets(rows: PackedRows) -> Tensor:
    """Return where each row's response tokens begin among those of all rows, [R + 1]. ValueError
    for malformed rows.
    """
    lengths = rows.offsets.diff()
    offsets = rows.offsets.tolist()
    if len(offsets) != len(rows) + 1 or offsets[0] != 0 or offsets[-1] != len(rows.tokens):
        raise ValueError(
            f"{len(rows)} rows of {len(rows.tokens)} tokens do not have offsets {offsets}"
        )
    if bool((rows.prompt_lengths < 1).any()) or bool((rows.prompt_lengths > lengths).any()):
        raise ValueError(
            "expected every row to have at least one prompt token and no more of them than tokens"
        )
    response_lengths = lengths - rows.prompt_lengths
    return torch.cat([torch.zeros(1, dtype=torch.int64), response_lengths.cumsum(0)])


def micro_batches(
    rows: PackedRows,
    budget: int,
    *,
    share: bool = True,
    inputs: ImageInputs | None = None,
) -> list[MicroBatch]:
    """Cut rows, in their order, into the fewest micro-batches of at most ``budget`` tokens, as even
    as possible.

    A row longer than ``budget`` is a micro-batch by itself. No rows give one empty micro-batch.
    With ``share`` a prompt that neighbouring rows of a micro-batch have in common is computed once,
    where that saves enough. ``inputs`` lays out images; ValueError without it for rows that show
    any, and with it for prompts with places for images that were not given.
    """
    response = response_offsets(rows)
    if inputs is None and rows.images is not None and rows.images.shows_any():
        raise ValueError(
            "the rows show images: expected a model that was built with the config's images"
        )
    if inputs is not None:
        inputs.check_given(rows)
    return [
        _pack(rows, response, start=start, stop=stop, share=share, inputs=inputs)
        for start, stop in _cut(rows.offsets.numpy(), budget)
    ]


def idle_batch(rows: PackedRows) -> MicroBatch:
    """Return a micro-batch of one token that predicts nothing, to run after the micro-batches of
    ``rows``.
    """
    responses = int(response_offsets(rows)[-1])
    none = torch.zeros(0, dtype=torch.int64)
    token = torch.zeros(1, 1, dtype=torch.int64)
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
    """Return (start, stop) of each micro-batch, for the smallest budget that needs no more of
    them.
    """
    cuts = _filled(offsets, budget)
    low = -(-int(offsets[-1]) // len(cuts))
    high = budget
    while low < high:
        middle = (low + high) // 2
        smaller = _filled(offsets, middle)
        if len(smaller) <= len(cuts):
            cuts = smaller
            high = middle
        else:
            low = middle + 1
    return cuts


def _filled(offsets: Ints, budget: int) -> list[tuple[int, int]]:
    """Fill each micro-batch with as many rows as fit ``budget``, at least one. Returns (start,
    stop) of each.
    """
    cuts = []
    start = 0
    rows = len(offsets) - 1
    while start < rows:
        fitting = int(np.searchsorted(offsets, offsets[start] + budget, side="right")) - 1
        stop = max(start + 1, fitting)
        cuts.append((start, stop))
        start = stop
    if not cuts:
        return [(0, 0)]
    return cuts


def _pack(
    rows: PackedRows,
    response: Tensor,
    start: int,
    stop: int,
    share: bool,
    inputs: ImageInputs | None,
) -> MicroBatch:
    """Pack rows ``start`` to ``stop``. Vectorized: thousands of short rows must not cost a loop."""
    begins = rows.offsets[start:stop]
    lengths = rows.offsets[start : stop + 1].diff()
    prompts = rows.prompt_lengths
    order = lengths.argsort(stable=True)
    packed_lengths = lengths[order]
    packed_begins = packed_lengths.cumsum(0) - packed_lengths
    positions = torch.arange(int(lengths.sum())) - packed_begins.repeat_interleave(packed_lengths)
    # [T], index of each packed token in the batch
    source = positions + begins[order].repeat_interleave(packed_lengths)

    offsets = response[start : stop + 1] - response[start]
    counts = offsets.diff()
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
    # [K], position of the token in its row
    in_row = prompts[start:stop].repeat_interleave(counts) + within
    # [R], where each row begins in the pack
    place = torch.empty_like(begins).scatter_(0, order, packed_begins)
    predicting = place.repeat_interleave(counts) + in_row - 1
    shown = None
    if rows.images is not None:
        shown = rows.images.of_row[start:stop]
    group = same_prompts(rows.tokens, begins, prompts[start:stop], shown, rows.routes)
    shared = None
    if share and stop - start > 1:
        shared = find_shared(group, prompts[start:stop], lengths, place)
    if shared is not None:
        source = source[shared.first]
        positions = positions[shared.first]
        predicting = shared.whole[predicting]
    position_ids = positions[None]
    images = None
    if inputs is not None:
        layout = inputs.layout(rows, start, stop, group)
        if layout is not None:
            in_images, images = layout.select(source - int(rows.offsets[start]))
            if inputs.has_positions:
                position_ids = torch.cat([position_ids, in_images])[:, None]
    runs = []
    for length, same in groupby(packed_lengths.tolist()):
        runs.append((len(list(same)), length))
    return MicroBatch(
        input_ids=rows.tokens[source][None],
        position_ids=position_ids,
        runs=tuple(runs),
        predicting=predicting,
        targets=rows.tokens[begins.repeat_interleave(counts) + in_row],
        offsets=offsets,
        tokens=slice(int(response[start]), int(response[stop])),
        shared=shared,
        images=images,
        routes=None if rows.routes is None else rows.routes[source],
    )
