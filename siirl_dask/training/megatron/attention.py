"""Attention of megatron-core's layers over packed rows, by the project's own kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from siirl_dask.training.model.attention import packed_attention
from siirl_dask.training.packing import Packing


@dataclass(frozen=True, slots=True)
class CoreRows:
    """Rows of a micro-batch, in place of a mask."""

    packing: Packing
    tokens: int
    """Tokens of the rows; those after them only fill up the parts of ranks."""


class PackedCoreAttention(nn.Module):
    """A core attention for megatron-core's ``SelfAttention``. Rows are told by CoreRows, in place of a mask."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **others: Any) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: CoreRows,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend within each packed row. [T, 1, H, D], [T, 1, H_kv, D] twice -> [T, 1, H * D]."""
        rows = attention_mask
        q, k, v = (each[: rows.tokens].permute(1, 2, 0, 3) for each in (query, key, value))
        output, _ = packed_attention(self, q, k, v, None, packing=rows.packing)
        return pad(output.transpose(0, 1).flatten(2), (0, 0, 0, 0, 0, len(query) - rows.tokens)).contiguous()
