"""Keys and values of rows that grow by different numbers of tokens in a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from siirl_dask.devices import accelerator

_COLUMNS = 32  # least number of columns by which a cache grows


class DraftCache:
    """Keys and values of some rows in all layers: those of a row's token at position p are in
    column p.

    A pass is over tokens that follow each row's own; of these some stay (``keep``), and the next
    pass writes over the others.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, tuple[Tensor, Tensor]],
        lengths: Sequence[int],
        of_prompt: Sequence[int],
    ) -> None:
        """``layers`` [P, H, C, D] are of P prompts of ``lengths`` [P] tokens, each with its last
        token in the last column; row r begins with prompt ``of_prompt[r]``.
        """
        self.lengths: NDArray[np.int64] = np.asarray(lengths)[np.asarray(of_prompt)]
        """Tokens of each row that stay. [B]."""
        self._positions = torch.empty(0)
        self._rows = torch.empty(0)
        self._end = 0
        self._masks: dict[int | None, Tensor] = {}
        self._layers = {}
        for layer, pair in layers.items():
            self._layers[layer] = tuple(self._aligned(part, of_prompt) for part in pair)

    def begin(self, count: int, device: torch.device) -> Tensor:
        """Begin a pass over the next ``count`` tokens of each row, and return their positions. [B,
        count].
        """
        positions = torch.from_numpy(self.lengths[:, None] + np.arange(count))
        self._positions = accelerator.copied_to(device, positions)
        self._rows = torch.arange(len(self.lengths), device=device)[:, None]
        self._end = int(self.lengths.max()) + count
        self._masks.clear()
        return self._positions

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's keys and values of this pass in, and return all. [B, H, count, D] each ->
        [B, H, C, D] each.
        """
        keys, values = self._layers[layer]
        if keys.shape[2] < self._end:
            keys = _grown(keys, self._end)
            values = _grown(values, self._end)
            self._layers[layer] = (keys, values)
        keys[self._rows, :, self._positions] = key.transpose(1, 2)
        values[self._rows, :, self._positions] = value.transpose(1, 2)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def mask(self, query: Tensor, window: int | None) -> Tensor:
        """Return what is added to the scores of the pass's tokens, made once for all layers. [B, 1,
        count, C].
        """
        if window not in self._masks:
            columns = torch.arange(self._end, device=query.device)
            places = self._positions[:, None, :, None]
            seen = columns <= places
            if window is not None:
                seen &= columns > places - window
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            self._masks[window] = mask.masked_fill_(~seen, -torch.inf)
        return self._masks[window]

    def keep(self, counts: NDArray[np.int64]) -> None:
        """Let the first ``counts`` [B] tokens of the pass stay."""
        self.lengths = self.lengths + counts

    def select(self, rows: NDArray[np.intp]) -> None:
        """Keep these rows, in this order."""
        self.lengths = self.lengths[rows]
        columns = int(self.lengths.max())
        for layer, pair in self._layers.items():
            index = accelerator.copied_to(pair[0].device, torch.from_numpy(rows))
            self._layers[layer] = tuple(part[:, :, :columns][index] for part in pair)

    def _aligned(self, part: Tensor, of_prompt: Sequence[int]) -> Tensor:
        """Return rows of prompts with their first tokens in the first column. [P, H, C, D] -> [B,
        H, room, D].
        """
        last = part.shape[2] - 1
        longest = int(self.lengths.max())
        places = np.arange(longest) + (part.shape[2] - self.lengths)[:, None]
        columns = torch.from_numpy(places.clip(max=last)).to(part.device)
        prompts = torch.as_tensor(of_prompt, device=part.device)[:, None]
        rows = part.transpose(1, 2)[prompts, columns].transpose(1, 2)
        return _grown(rows, longest)


def _grown(tensor: Tensor, columns: int) -> Tensor:
    """Return a copy with room for more than ``columns``, which must be finite. [B, H, C, D]."""
    rows, heads, filled, width = tensor.shape
    grown = tensor.new_zeros(rows, heads, columns + max(_COLUMNS, columns // 4), width)
    grown[:, :, :filled] = tensor
    return grown
