"""Decodes with tensors of fixed shapes, so that a step is captured once as a graph of the device
and then replayed.

A pass over one token a row takes a few milliseconds of the device and ten times as many of Python,
which launches its kernels. A captured step (torch.cuda.CUDAGraph) is launched at once. It reads and
writes the same memory at each replay: so the cache of keys and values is allocated for the whole
batch, all that changes from token to token is in tensors, and there is a graph for each number of
rows and of columns. Rows and columns are rounded up, to few different numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl_dask.devices import accelerator
from siirl_dask.rollout.memory import cache_columns, cache_rows

logger = logging.getLogger("siirl_dask.rollout")

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a step, which may be run several times, and returns what replays it with the tensors
that it used."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors that change from one token to the next, for up to R rows: a captured step reads
    them nowhere else.
    """

    tokens: Tensor
    """The rows' latest tokens. [R] int64."""
    starts: Tensor
    """The column of each row's first token. [R] int64."""
    column: Tensor
    """The column of the latest tokens. [1] int64."""
    logits: Tensor
    """The result of the step. [R, V] float32."""


@dataclass(frozen=True, slots=True)
class GraphRows:
    """Rows whose prompts were computed, P different ones."""

    prompts: Tensor
    """The prompt of each row. [B] int64."""
    starts: Tensor
    """The column of each row's first token. [B] int64."""
    logits: Tensor
    """Logits of some rows' next tokens, whose device and vocabulary count. [any, V] float32."""


class FixedCache:
    """Keys and values of a fixed number of rows and columns, as ``cached_attention`` needs them for
    one token a row.

    They lie at the beginning of each layer's memory; caches of other shapes lie in the same.
    """

    def __init__(
        self,
        memory: Mapping[nn.Module, tuple[Tensor, Tensor]],
        inputs: Inputs,
        rows: int,
        columns: int,
    ) -> None:
        """``memory`` [R, H, C, D] of each layer has room for at least ``rows * columns`` tokens."""
        self.rows = rows
        self.columns = columns
        self._inputs = inputs
        self._layers = {
            layer: (_shaped(keys, rows, columns), _shaped(values, rows, columns))
            for layer, (keys, values) in memory.items()
        }
        self._masks: dict[int | None, Tensor] = {}

    @property
    def layers(self) -> list[nn.Module]:
        """Layers whose keys and values are here."""
        return [*self._layers]

    def step(self, model: PreTrainedModel) -> None:
        """Compute the logits of the tokens after the latest ones. Nothing here may depend on a
        number of the host that changes.
        """
        self._masks.clear()
        starts = self._inputs.starts[: self.rows, None]
        output = model(
            input_ids=self._inputs.tokens[: self.rows, None],
            position_ids=(self._inputs.column - starts).clamp(min=0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=1,
            decoding=self,
        )
        self._inputs.logits[: self.rows].copy_(output.logits[:, -1])
        self._masks.clear()

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's keys and values of the latest tokens in, and return all. [R, H, 1, D] ->
        [R, H, C, D].
        """
        keys, values = self._layers[layer]
        keys.index_copy_(2, self._inputs.column, key)
        values.index_copy_(2, self._inputs.column, value)
        return keys, values

    def mask(self, query: Tensor, window: int | None) -> Tensor:
        """Return what is added to the scores of the latest tokens, made once for all layers. [R,
        1, 1, C].
        """
        if window not in self._masks:
            columns = torch.arange(self.columns, device=query.device)
            seen = (columns <= self._inputs.column) & (
                columns >= self._inputs.starts[: self.rows, None]
            )
            if window is not None:
                seen &= columns > self._inputs.column - window
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(
                ~seen, -torch.inf
            )
            self._masks[window] = mask[:, None, None]
        return self._masks[window]

    def tokens(self, layer: nn.Module, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return a copy of some rows' first ``count`` columns. [n, H, count, D] each."""
        keys, values = self._layers[layer]
        return keys[rows, :, :count], values[rows, :, :count]

    def fill(self, layer: nn.Module, key: Tensor, value: Tensor) -> None:
        """Replace a layer's keys and values. [n, H, count, D] each."""
        keys, values = self._layers[layer]
        _fill(keys, key)
        _fill(values, value)


def _fill(fixed: Tensor, part: Tensor) -> None:
    """Write a layer's first rows and columns; all else is 0, since it must be finite. [R, H, C,
    D], [n, H, c, D].
    """
    fixed.zero_()
    fixed[: part.shape[0], :, : part.shape[2]] = part


def _allocated(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return memory for a layer's keys or values. [P, H, c, D] -> [rows, H, columns, D]."""
    return like.new_empty(rows, like.shape[1], columns, like.shape[3])


def _inputs(logits: Tensor, rows: int) -> Inputs:
    """Return the inputs of so many rows on the device of the logits. [B, V]."""
    numbers = torch.zeros(2 * rows + 1, dtype=torch.int64, device=logits.device)
    tokens, starts, column = numbers.split([rows, rows, 1])
    return Inputs(tokens, starts, column, logits.new_empty(rows, logits.shape[1]))


def _shaped(memory: Tensor, rows: int, columns: int) -> Tensor:
    """Return the beginning of a layer's memory in another shape. [R, H, C, D] -> [rows, H,
    columns, D].
    """
    _, heads, _, width = memory.shape
    return memory.view(-1)[: rows * heads * columns * width].view(rows, heads, columns, width)


class DecodeGraphs:
    """Captured steps of a model, and the memory that they use; it stays from one batch to the
    next, until ``drop``.
    """

    def __init__(self, model: PreTrainedModel, new_capture: Callable[[], Capture]) -> None:
        """``new_capture`` is called once for all graphs that are there together, which share
        memory.
        """
        self._model = model
        self._new_capture = new_capture
        self._refused = False
        self.drop()

    @property
    def usable(self) -> bool:
        """Whether no step of this model failed to be captured; where one did, nothing of its
        memory is left.
        """
        if self._refused:
            self.drop()
        return not self._refused

    def drop(self) -> None:
        """Free the graphs and their memory."""
        self._capture: Capture | None = None
        self._replays: dict[tuple[int, int], tuple[FixedCache, Callable[[], None]]] = {}
        self._memory: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._inputs: Inputs | None = None
        self._addresses: list[int] = []

    def begin(
        self,
        layers: dict[nn.Module, tuple[Tensor, Tensor]],
        rows: GraphRows,
        columns: int,
    ) -> GraphDecoder:
        """Go on with rows whose prompts were computed, to as many ``columns``. [P, H, C, D].

        ``layers`` are emptied one after the other, so that keys and values take no memory twice.
        """
        count = len(rows.prompts)
        addresses = [
            tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())
        ]
        if addresses != self._addresses or not self._has_room(layers, count, columns):
            self.drop()
            self._addresses = addresses
            self._inputs = _inputs(rows.logits, cache_rows(count))
        inputs = self._inputs
        assert inputs is not None
        filled = next(iter(layers.values()))[0].shape[2]
        for layer in [*layers]:
            pair = layers.pop(layer)
            if layer not in self._memory:
                keys, values = (
                    _allocated(part, cache_rows(count), cache_columns(columns)) for part in pair
                )
                self._memory[layer] = keys, values
            for memory, part in zip(self._memory[layer], pair, strict=True):
                _fill(
                    _shaped(memory, cache_rows(count), cache_columns(filled + 1)),
                    part[rows.prompts],
                )
            del pair
        inputs.tokens.zero_()
        inputs.starts.zero_()
        inputs.starts[:count] = rows.starts
        return GraphDecoder(self, inputs, count, filled)

    def _has_room(
        self,
        layers: Mapping[nn.Module, tuple[Tensor, Tensor]],
        rows: int,
        columns: int,
    ) -> bool:
        if self._inputs is None or layers.keys() != self._memory.keys():
            return False
        if cache_rows(rows) > len(self._inputs.tokens):
            return False
        needed = cache_rows(rows) * cache_columns(columns)
        there = (pair[0].shape for pair in self._memory.values())
        return all(shape[0] * shape[2] >= needed for shape in there)

    def cache(self, rows: int, columns: int) -> FixedCache:
        """Return the cache of a number of rows and columns, which have their graph or get it at
        the first replay.
        """
        found = self._replays.get((rows, columns))
        if found is not None:
            return found[0]
        assert self._inputs is not None
        return FixedCache(self._memory, self._inputs, rows, columns)

    def replay(self, cache: FixedCache) -> None:
        """Compute a token of each row; the first time with this shape its step is captured."""
        shape = cache.rows, cache.columns
        if shape not in self._replays:
            self._replays[shape] = cache, self._captured(cache)
        self._replays[shape][1]()

    def _captured(self, cache: FixedCache) -> Callable[[], None]:
        def step() -> None:
            cache.step(self._model)

        if self._refused:
            return step
        try:
            if self._capture is None:
                self._capture = self._new_capture()
            return self._capture(step)
        except Exception as failure:  # a model may do anything that a graph cannot hold
            self._refused = True
            logger.warning(
                "%s decodes without graphs, which takes longer on short steps: %s: %s",
                type(self._model).__name__,
                type(failure).__name__,
                failure,
            )
            return step


class GraphDecoder:
    """Some rows under way, by replays of captured steps; its methods are those of ``Decoder``."""

    def __init__(self, graphs: DecodeGraphs, inputs: Inputs, rows: int, columns: int) -> None:
        """``columns`` of the cache are filled for as many ``rows``."""
        self._graphs = graphs
        self._inputs = inputs
        self._rows = rows
        self._columns = columns
        self._cache = self._fitting()

    def append(self, tokens: Tensor) -> None:
        """Add a token to each row. [B]."""
        self._inputs.tokens[: self._rows] = tokens

    def logits(self) -> Tensor:
        """Compute the logits of each row's next token, which are there until the next call. [B,
        V] float32.
        """
        if self._columns == self._cache.columns:
            self._move(torch.arange(self._rows, device=self._inputs.tokens.device))
        self._inputs.column.fill_(self._columns)
        self._graphs.replay(self._cache)
        self._columns += 1
        return self._inputs.logits[: self._rows]

    def select(self, rows: NDArray[np.intp]) -> None:
        """Keep these rows, in this order."""
        index = accelerator.copied_to(self._inputs.tokens.device, torch.from_numpy(rows))
        self._rows = len(rows)
        self._move(index)
        for numbers in (self._inputs.tokens, self._inputs.starts):
            kept = numbers[index]
            numbers.zero_()
            numbers[: len(rows)] = kept

    def _move(self, rows: Tensor) -> None:
        """Move rows to a cache of the shape that they need from now on, in the same memory, a
        layer at a time.
        """
        before = self._cache
        self._cache = self._fitting()
        for layer in before.layers:
            key, value = before.tokens(layer, rows, self._columns)
            self._cache.fill(layer, key, value)

    def _fitting(self) -> FixedCache:
        return self._graphs.cache(cache_rows(self._rows), cache_columns(self._columns + 1))


def decode_graphs(model: PreTrainedModel, device: torch.device) -> DecodeGraphs | None:
    """Return what captures a model's steps; None where the device has no graphs, and for mixtures
    of experts, whose kernels are launched by what the tokens choose.
    """
    if not accelerator.has_graphs(device) or getattr(
        model.config.get_text_config(), "num_experts_per_tok", None
    ):
        return None
    return DecodeGraphs(model, partial(accelerator.graph_capture, device))
