"""A table's prompt and response columns as the packed rows a trainer takes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.coordinator.tensors import packed, ragged
from siirl_dask.schema import PROMPT_IDS, RESPONSE_IDS
from siirl_dask.training import PackedRows


@dataclass(frozen=True, slots=True)
class PackedTable:
    rows: PackedRows
    response_offsets: Tensor
    """[R + 1]: row r owns response tokens ``response_offsets[r]`` to ``response_offsets[r + 1]``."""

    def per_token(self, flat: Tensor, kind: pa.DataType) -> pa.Array:
        """[K] numbers of response tokens as a list column."""
        return ragged(flat, self.response_offsets, kind)

    def spread(self, per_row: Tensor) -> Tensor:
        """[R] numbers of rows to [K], each repeated for the row's response tokens."""
        return per_row.repeat_interleave(self.response_offsets.diff())


def pack_rows(table: pa.Table) -> PackedTable:
    """Each row's prompt and response, one after the other: R rows, T tokens, K of them in responses."""
    prompts, prompt_offsets = packed(table[PROMPT_IDS])
    responses, response_offsets = packed(table[RESPONSE_IDS])
    offsets = prompt_offsets + response_offsets
    tokens = torch.empty(int(offsets[-1]), dtype=torch.int64)
    is_response = torch.ones(len(tokens), dtype=torch.bool)
    lengths = prompt_offsets.diff()
    within = torch.arange(len(prompts)) - prompt_offsets[:-1].repeat_interleave(lengths)
    is_response[offsets[:-1].repeat_interleave(lengths) + within] = False
    tokens[~is_response] = prompts.long()
    tokens[is_response] = responses.long()
    return PackedTable(PackedRows(tokens, offsets, lengths), response_offsets)
