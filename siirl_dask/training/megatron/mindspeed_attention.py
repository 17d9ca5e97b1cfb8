"""Attention over packed rows by megatron-core's DotProductAttention, whose forward MindSpeed
replaces.

Import this after MindSpeed and megatron-core. MindSpeed's forward calls npu_fusion_attention for
rows of any lengths in one tensor (layout TND).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from siirl_dask.devices.fused import causal_mask
from siirl_dask.training.megatron.attention import CoreRows
from siirl_dask.training.model.attention import ends_on_host


class MindSpeedCoreAttention(DotProductAttention):  # type: ignore[misc]  # megatron-core may not be here
    """A core attention for megatron-core's ``SelfAttention``. Rows are told by CoreRows, in
    place of a mask.
    """

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
        packing = attention_mask.packing
        heads = [*rows.gather(query, key, value)]
        if packing.shared is not None:
            heads = packing.shared.spread(heads)
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in heads)
        # on the host, where the kernel wants them
        ends = torch.tensor(ends_on_host(packing.runs), dtype=torch.int32)
        output: Tensor = super().forward(
            q,
            k,
            v,
            causal_mask(q.device),
            attn_mask_type=AttnMaskType.causal,
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
            ),
        )
        output = output.reshape(q.shape)
        if packing.shared is not None:
            output = packing.shared.gather(output)
        return rows.scatter(output, query)
