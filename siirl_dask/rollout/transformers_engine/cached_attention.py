"""Attention over the cached keys and values of rows under way, and the cache that they lie in.

The memory grows by large pieces, instead of being copied for each token, and there is no mask where
all rows are equally long.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from siirl_dask.devices import accelerator
from siirl_dask.models.score_attention import attend_by_scores
from siirl_dask.models.spans import register_with_probe, window_of
from siirl_dask.rollout.transformers_engine.decode_graphs import (
    DecodeGraphs,
    FixedCache,
    GraphDecoder,
    GraphRows,
)
from siirl_dask.rollout.transformers_engine.draft_cache import DraftCache

DECODING = "siirl_decoding"
"""Name of ``cached_attention`` in transformers. No mask function has that name, so transformers
makes no mask."""
_COLUMNS = 32  # least number of columns by which a cache grows


class KeyValueCache:
    """Keys and values of some rows in all layers, each row's last token in the last column.

    A row with fewer tokens than the longest has nothing in its first columns.
    """

    def __init__(self, lengths: Tensor, width: int) -> None:
        """``lengths`` [B] are the rows' tokens that the first pass computes, in ``width``
        columns.
        """
        self.columns = 0
        """Columns that are filled, before the tokens of the pass under way."""
        self._lengths = lengths
        self._width = width
        self._uneven = bool((lengths < width).any())
        self.stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        """Keys and values of each layer. [B, H, C, D]."""
        self._masks: dict[int | None, Tensor | None] = {}

    def positions(self, count: int) -> Tensor:
        """Return the position in its row of each of the next ``count`` tokens, 0 where there is
        none. [B, count].
        """
        behind = self._width - self._lengths
        columns = torch.arange(self.columns, self.columns + count, device=behind.device)
        return (columns - behind[:, None]).clamp(min=0)

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values of this pass, and return all. [B, H, count, D] each ->
        [B, H, C, D] each.
        """
        end = self.columns + key.shape[2]
        if not self.columns:
            self.stored[layer] = key, value
            return key, value
        keys, values = self.stored[layer]
        if keys.shape[2] < end:
            keys = _grown(keys, self.columns)
            values = _grown(values, self.columns)
            self.stored[layer] = keys, values
        keys[:, :, self.columns : end] = key
        values[:, :, self.columns : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, count: int) -> None:
        """End a pass over ``count`` tokens a row."""
        self.columns += count
        self._masks.clear()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be named several times."""
        for layer, pair in self.stored.items():
            self.stored[layer] = tuple(each[:, :, : self.columns][rows] for each in pair)  # type: ignore[assignment]
        self._lengths = self._lengths[rows]

    def continued(
        self,
        graphs: DecodeGraphs,
        prompts: Tensor,
        logits: Tensor,
        longest: int,
    ) -> GraphDecoder:
        """Move all keys and values to a cache of fixed shape with room for ``longest`` tokens more;
        none are left.

        ``prompts`` [B] says which row of this cache each of its rows is.
        """
        rows = GraphRows(prompts, self._width - self._lengths[prompts], logits)
        return graphs.begin(self.stored, rows, self.columns + longest)

    def mask(self, query: Tensor, window: int | None) -> Tensor | None:
        """Return what is added to the scores of the pass's tokens, [B or 1, 1, count, C], made once
        for all layers.

        None where a single token sees all columns, and where several tokens see what a causal mask
        lets them see.
        """
        end = self.columns + query.shape[2]
        if window is not None and window >= end:
            window = None
        if window not in self._masks:
            self._masks[window] = None
            if self._uneven or window is not None or (self.columns > 0 and query.shape[2] > 1):
                self._masks[window] = self._made(query, end, window)
        return self._masks[window]

    def _made(self, query: Tensor, end: int, window: int | None) -> Tensor:
        keys = torch.arange(end, device=query.device)
        queries = keys[self.columns :, None]
        seen = (keys <= queries) & (keys >= (self._width - self._lengths)[:, None, None, None])
        if window is not None:
            seen &= keys > queries - window
        # a place without a token sees itself: nothing at all would give nan
        seen |= keys == queries
        return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~seen, -torch.inf
        )


def _grown(tensor: Tensor, columns: int) -> Tensor:
    """Return a copy of the first columns with room for more. [B, H, C, D]."""
    rows, heads, _, width = tensor.shape
    grown = tensor.new_empty(rows, heads, columns + max(_COLUMNS, columns // 4), width)
    grown[:, :, :columns] = tensor[:, :, :columns]
    return grown


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    decoding: KeyValueCache | FixedCache | DraftCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend to the cached tokens of each row and to those of this pass. [B, H, T, D], [B, H_kv, T,
    D] twice -> [B, T, H, D].

    ``decoding`` is an argument of the model's forward; ``s_aux`` are sinks, [H].
    NotImplementedError for attention with a position bias or a mask of its own.
    """
    if position_bias is not None or attention_mask is not None:
        what = "a mask of its own"
        if position_bias is not None:
            what = "a position bias"
        raise NotImplementedError(
            f"cached attention supports no {what}, which {type(module).__name__} has"
        )
    rows, heads, count, width = query.shape
    few = key.shape[1]
    mask = decoding.mask(query, window_of(module, sliding_window))
    key, value = decoding.extend(module, key, value)
    if softcap is not None or s_aux is not None:
        if mask is None:
            mask = _causal_mask(query)
        attended = attend_by_scores(
            query,
            key,
            value,
            mask,
            scaling=scaling,
            softcap=softcap,
            sinks=s_aux,
        )
        return attended, None
    if count == 1:  # the heads that share keys are queries of one head: their keys are read once
        query = query.view(rows, few, heads // few, width)
    output = accelerator.attend(
        query, key, value, mask, causal=mask is None and count > 1, scale=scaling
    )
    return output.reshape(rows, heads, count, -1).transpose(1, 2), None


PROBE = register_with_probe(DECODING, cached_attention)
"""Name of the attention that a model has in one pass before: see ``register_with_probe``."""


def _causal_mask(query: Tensor) -> Tensor:
    """Return what is added to the scores of a pass before which there are no tokens, or which is
    over one. [T, T].
    """
    count = query.shape[2]
    return torch.full((count, count), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
