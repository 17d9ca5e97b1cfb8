"""Attention of megatron-core's layers over packed rows, by the project's own kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from siirl_dask.training.model.attention import packed_attention
from siirl_dask.training.packing import Packing


class PackedCoreAttention(nn.Module):
    """A core attention for megatron-core's ``SelfAttention``. Rows are told by a Packing, in place of a mask."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **others: Any) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Packing,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend within each packed row. [T, 1, H, D], [T, 1, H_kv, D] twice -> [T, 1, H * D]."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        output, _ = packed_attention(self, q, k, v, None, packing=attention_mask)
        return output.transpose(0, 1).flatten(2).contiguous()
