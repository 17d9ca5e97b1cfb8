"""Attention of megatron-core's layers over packed rows, by the project's own kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from siirl_dask.context import Rank
from siirl_dask.training.model.attention import packed_attention
from siirl_dask.training.packing import Packing
from siirl_dask.training.parallel.ulysses import to_heads, to_tokens


@dataclass(frozen=True, slots=True)
class CoreRows:
    """Rows of a micro-batch, in place of a mask."""

    packing: Packing
    tokens: int
    """Tokens of the rows; those after them only fill up the parts of ranks."""
    context: Rank | None = None
    """This rank among those that have a part of the tokens each; None where each has all."""
    routes: Tensor | None = None
    """[N, W] int64, see ``PackedRows.routes``, of the tokens that this rank has between attention
    and MLP; -1 where the router chooses. None: it chooses everywhere."""

    def gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give megatron-core's heads the shape for attention: the rows' tokens alone, and of a rank
        that has a part of them all, of a part of the heads. [T, 1, H, D], [T, 1, H_kv, D] twice ->
        [1, H', N, D], [1, H_kv', N, D] twice.
        """
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        if self.context is not None:
            q, k, v = to_heads(q, k, v, self.context)
        return q[:, :, : self.tokens], k[:, :, : self.tokens], v[:, :, : self.tokens]

    def scatter(self, output: Tensor, query: Tensor) -> Tensor:
        """Return attention's output for the tokens of ``query``. [N, H', D], [T, 1, H, D] -> [T,
        1, H * D].
        """
        ranks = 1
        if self.context is not None:
            ranks = self.context.size
        output = pad(output, (0, 0, 0, 0, 0, len(query) * ranks - self.tokens))
        if self.context is not None:
            output = to_tokens(output, self.context)
        return output.flatten(1)[:, None].contiguous()


class PackedCoreAttention(nn.Module):
    """A core attention for megatron-core's ``SelfAttention``. Rows are told by CoreRows, in
    place of a mask.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        **others: Any,
    ) -> None:
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
        output, _ = packed_attention(
            self, *rows.gather(query, key, value), None, packing=rows.packing
        )
        return rows.scatter(output[0], query)
