"""A table's prompt and response columns as the packed rows a trainer takes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.coordinator.tensors import packed, ragged, values
from siirl_dask.errors import DataError
from siirl_dask.schema import ADVANTAGE, ADVANTAGES, PROMPT_IDS, RESPONSE_IDS, RESPONSE_MASK
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

    def column(self, table: pa.Table, name: str) -> Tensor:
        """[K]: a column with a number a response token, or one a row, which is spread. DataError for any other."""
        if not pa.types.is_list(table[name].type):
            return self.spread(values(table[name]))
        flat, offsets = packed(table[name])
        if not torch.equal(offsets, self.response_offsets):
            raise DataError(f"column {name!r} has other lengths than the responses: expected a value for each token")
        return flat

    def optional(self, table: pa.Table, name: str) -> Tensor | None:
        return self.column(table, name) if name in table.column_names else None


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


def response_mask(table: pa.Table) -> tuple[Tensor, Tensor]:
    """[K] bool, which response tokens are learned from, and [R + 1], where each row's begin among all of them."""
    offsets = packed(table[RESPONSE_IDS])[1]
    if RESPONSE_MASK not in table.column_names:
        return torch.ones(int(offsets[-1]), dtype=torch.bool), offsets
    mask, mask_offsets = packed(table[RESPONSE_MASK])
    if not torch.equal(offsets, mask_offsets):
        raise DataError(f"{RESPONSE_MASK!r} has other lengths than the responses: expected a value for each token")
    return mask, offsets


def advantages_of(table: pa.Table) -> str:
    """The name of the column that holds advantages: of tokens where there are such, else of rows."""
    return ADVANTAGES if ADVANTAGES in table.column_names else ADVANTAGE
