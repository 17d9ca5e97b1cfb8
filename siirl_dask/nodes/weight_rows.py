"""Parameters as rows of a table: names, types, shapes and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from siirl_dask.errors import PeerError
from siirl_dask.schema import (
    GROUP_ID,
    PARAMETER,
    PARAMETER_DATA,
    PARAMETER_DTYPE,
    PARAMETER_SHAPE,
    ROW_ID,
    TOKENS,
    TYPES,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Parameter:
    """Name, type and shape of one parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: Tensor) -> Parameter:
        return Parameter(name, tensor.dtype, tuple(tensor.shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def parameter_rows(
    numbers: Sequence[int], parameters: Sequence[Parameter], data: pa.Array
) -> pa.Table:
    """Return one row for each parameter, whose row id is its number."""
    index = pa.array(numbers, pa.int64())
    sizes = [parameter.numel for parameter in parameters]
    names = [parameter.name for parameter in parameters]
    dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in parameters]
    shapes = [list(parameter.shape) for parameter in parameters]
    arrays = {
        ROW_ID: index,
        GROUP_ID: index,
        TOKENS: pa.array(sizes, pa.int64()),
        PARAMETER: pa.array(names, TYPES[PARAMETER]),
        PARAMETER_DTYPE: pa.array(dtypes, TYPES[PARAMETER_DTYPE]),
        PARAMETER_SHAPE: pa.array(shapes, TYPES[PARAMETER_SHAPE]),
        PARAMETER_DATA: data,
    }
    return pa.table(arrays)


class BinaryBuilder:
    """Builds a large_binary array of tensors' bytes; each tensor is copied once, when it is
    added.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum([0, *sizes], dtype=np.int64)
        self._data = np.empty(int(self._ends[-1]), dtype=np.uint8)
        self._count = 0

    def add(self, tensor: Tensor) -> None:
        """Copy the bytes of the next tensor."""
        start = self._ends[self._count]
        stop = self._ends[self._count + 1]
        as_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._data[start:stop] = as_bytes.cpu().numpy()
        self._count += 1

    def array(self) -> pa.Array:
        """Return the array, once all tensors are added."""
        assert self._count == len(self._ends) - 1
        buffers = [None, pa.py_buffer(self._ends), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(pa.large_binary(), self._count, buffers)


def tensors_of(table: pa.Table) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each row, over the table's memory. PeerError for bytes that do
    not fit the shape.
    """
    data = table[PARAMETER_DATA]
    rows = table.select([PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE]).to_pylist()
    for index, row in enumerate(rows):
        name = row[PARAMETER]
        dtype = row[PARAMETER_DTYPE]
        shape = row[PARAMETER_SHAPE]
        buffer = data[index].as_buffer()
        numel = int(np.prod(shape))
        if dtype not in _DTYPES or buffer.size != _DTYPES[dtype].itemsize * numel:
            raise PeerError(
                f"parameter {name!r}: {buffer.size} bytes are no {dtype} tensor of shape {shape}"
            )
        raw = pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])
        flat = from_dlpack(raw)  # which works on read-only memory as well
        yield name, flat.view(_DTYPES[dtype]).reshape(shape)
