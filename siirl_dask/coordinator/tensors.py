"""Between Arrow's ragged columns and packed tensors. A list column's values and offsets are the packed layout
already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack


def packed(column: pa.ChunkedArray) -> tuple[Tensor, Tensor]:
    """Values [T] and offsets [R + 1] (int64, from 0) of a list column; the values of a single chunk are not copied.

    The values tensor shares Arrow's memory: do not write to it. ValueError if a row is null.
    """
    array = _one_chunk(column)
    if array.null_count:
        raise ValueError(
            f"a list column has {array.null_count} null rows: expected lists, empty ones where there is none"
        )
    offsets = array.offsets.to_numpy().astype(np.int64)
    return _tensor(array.flatten()), torch.from_numpy(offsets - offsets[0])


def values(column: pa.ChunkedArray) -> Tensor:
    """A column of numbers as a tensor [R] over the same memory. ValueError if a row is null."""
    array = _one_chunk(column)
    if array.null_count:
        raise ValueError(f"a column of numbers has {array.null_count} null rows")
    return _tensor(array)


def _tensor(array: pa.Array) -> Tensor:
    """Over the array's memory; booleans, which Arrow packs in bits, are copied."""
    if pa.types.is_boolean(array.type):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    return from_dlpack(array)


def ragged(flat: Tensor, offsets: Tensor | Sequence[int], kind: pa.DataType) -> pa.Array:
    """A list column of ``kind`` whose row r is ``flat[offsets[r]:offsets[r + 1]]``."""
    flat_array = pa.array(flat.detach().cpu().numpy(), kind.value_type)
    ends = torch.as_tensor(offsets).to("cpu", torch.int32).numpy()
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat_array, type=kind)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([pa.array([], column.type), *column.chunks])
