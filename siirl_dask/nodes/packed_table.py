"""Turns a table's prompt and response columns into the packed rows that a trainer takes, and tensors
into columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from siirl_dask.errors import DataError
from siirl_dask.nodes.row_images import row_images
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    with_large_offsets,
)
from siirl_dask.training import PackedRows


@dataclass(frozen=True, slots=True)
class PackedTable:
    """A table's rows packed one after the other. R rows have T tokens, K of them in responses."""

    rows: PackedRows
    response_offsets: Tensor
    """[R + 1]: row r owns response tokens ``response_offsets[r]`` to ``response_offsets[r +
    1]``."""

    def per_token(self, flat: Tensor, kind: pa.DataType) -> pa.Array:
        """Return a number per response token as a list column. [K]."""
        return ragged(flat, self.response_offsets, kind)

    def spread(self, per_row: Tensor) -> Tensor:
        """Repeat a number per row for each of its response tokens. [R] -> [K]."""
        return per_row.repeat_interleave(self.response_offsets.diff())

    def column(self, table: pa.Table, name: str) -> Tensor:
        """Return a column of a number per response token; a number per row is spread. [K].

        DataError for lists of other lengths than the responses.
        """
        kind = table[name].type
        if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
            return self.spread(values(table[name]))
        flat, offsets = packed(table[name])
        if not torch.equal(offsets, self.response_offsets):
            raise DataError(
                f"column {name!r} has other lengths than the responses: expected a value for each "
                "token"
            )
        return flat

    def optional(self, table: pa.Table, name: str) -> Tensor | None:
        """Return ``column``, or None where the table does not have it."""
        if name not in table.column_names:
            return None
        return self.column(table, name)


def pack_rows(table: pa.Table, routes: Tensor | None = None) -> PackedTable:
    """Pack each row's prompt and response, one after the other, and the images that the prompts
    show, if any.

    ``routes`` are the rows' routed experts, [T, W] (see ``packed_routes``).
    """
    prompts, prompt_offsets = packed(table[PROMPT_IDS])
    responses, response_offsets = packed(table[RESPONSE_IDS])
    offsets = prompt_offsets + response_offsets
    tokens = torch.empty(int(offsets[-1]), dtype=torch.int64)
    is_response = torch.ones(len(tokens), dtype=torch.bool)
    prompt_lengths = prompt_offsets.diff()
    prompt_begins = prompt_offsets[:-1].repeat_interleave(prompt_lengths)
    row_begins = offsets[:-1].repeat_interleave(prompt_lengths)
    index_in_prompt = torch.arange(len(prompts)) - prompt_begins
    is_response[row_begins + index_in_prompt] = False
    tokens[~is_response] = prompts.long()
    tokens[is_response] = responses.long()
    rows = PackedRows(
        tokens=tokens,
        offsets=offsets,
        prompt_lengths=prompt_lengths,
        images=row_images(table),
        routes=routes,
    )
    return PackedTable(rows, response_offsets)


def response_mask(table: pa.Table) -> tuple[Tensor, Tensor]:
    """Return which response tokens are learned from, [K] bool, and where each row's tokens begin,
    [R + 1].

    DataError for a mask of other lengths than the responses.
    """
    _, offsets = packed(table[RESPONSE_IDS])
    if RESPONSE_MASK not in table.column_names:
        return torch.ones(int(offsets[-1]), dtype=torch.bool), offsets
    mask, mask_offsets = packed(table[RESPONSE_MASK])
    if not torch.equal(offsets, mask_offsets):
        raise DataError(
            f"{RESPONSE_MASK!r} has other lengths than the responses: expected a value for each "
            "token"
        )
    return mask, offsets


def advantages_of(table: pa.Table) -> str:
    """Return the name of the column that holds advantages: of tokens if there are any, else of
    rows.
    """
    return ADVANTAGES if ADVANTAGES in table.column_names else ADVANTAGE


Flags = NDArray[np.bool_]
"""[R] bool: one flag for each row."""


def valid_rows(table: pa.Table, names: Sequence[str]) -> Flags:
    """Return whether each row has no null in the named columns. [R].

    Columns that the table does not have do not count; it must have one of them.
    """
    valid = []
    for name in names:
        if name in table.column_names:
            valid.append(pc.is_valid(table[name]).to_numpy())
    flags: Flags = np.logical_and.reduce(valid)
    return flags


def scatter_valid(valid: Flags, column: pa.Array) -> pa.Array:
    """Spread a column of the valid rows over all rows, null in the others."""
    index_among_valid = np.cumsum(valid) - 1
    return column.take(pa.array(index_among_valid, pa.int64(), mask=~valid))


def packed(column: pa.ChunkedArray) -> tuple[Tensor, Tensor]:
    """Return values [T] and offsets [R + 1] (int64, from 0) of a list column; a single chunk is not
    copied.

    The values tensor shares Arrow's memory: do not write to it. ValueError if a row is null.
    """
    array = one_chunk(column)
    if array.null_count:
        raise ValueError(
            f"a list column has {array.null_count} null rows: expected lists, empty ones where "
            "there is none"
        )
    offsets = array.offsets.to_numpy().astype(np.int64)
    return _tensor(array.flatten()), torch.from_numpy(offsets - offsets[0])


def values(column: pa.ChunkedArray) -> Tensor:
    """Return a column of numbers as a tensor [R] over the same memory. ValueError if a row is
    null.
    """
    array = one_chunk(column)
    if array.null_count:
        raise ValueError(f"a column of numbers has {array.null_count} null rows")
    return _tensor(array)


def _tensor(array: pa.Array) -> Tensor:
    """Return a tensor over the array's memory; booleans, which Arrow packs in bits, are copied."""
    if pa.types.is_boolean(array.type):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    return from_dlpack(array)


def ragged(flat: Tensor, offsets: Tensor | Sequence[int], kind: pa.DataType) -> pa.Array:
    """Return a list column of ``kind`` whose row r is ``flat[offsets[r]:offsets[r + 1]]``."""
    flat_array = pa.array(flat.detach().cpu().numpy(), kind.value_type)
    ends = torch.as_tensor(offsets).to("cpu", torch.int64).numpy()
    return pa.LargeListArray.from_arrays(
        pa.array(ends, pa.int64()), flat_array, type=with_large_offsets(kind)
    )


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one array; where it has several chunks they are copied, with 64-bit
    offsets.
    """
    if column.num_chunks != 1:
        column = column.cast(with_large_offsets(column.type))
    if column.num_chunks == 1:
        return column.chunk(0)
    empty = pa.array([], column.type)  # a column without chunks has nothing to concatenate
    return pa.concat_arrays([empty, *column.chunks])
