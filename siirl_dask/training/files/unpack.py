"""Unpacks the weights of a packed (quantized) model, a file at a time: the model need not fit
into memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shutil import copymode
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from siirl_dask.errors import ConfigError
from siirl_dask.models.packed_weights import read_packing
from siirl_dask.models.weight_files import open_tensors
from siirl_dask.models.weight_names import STORED_TYPES
from siirl_dask.training.files.hugging_face import copy_others

_CONFIG = "config.json"
_SHARD = "5GB"
_INDEX = "model.safetensors.index.json"
_UNPACKED = torch.bfloat16  # has all values of MXFP4, and is what transformers makes of FP8
_BLOCKS = "_blocks"
_SCALES = "_scales"
_INVERSE_SCALE = "_scale_inv"
_ACTIVATIONS = ".activation_scale"
_BLOCK = (128, 128)  # where quantization_config names no weight_block_size, as in transformers


def unpacked_weights(base: str, method: str) -> dict[str, UnpackedWeight]:
    """Return the weights of the local folder ``base``, which ``method`` (``mxfp4`` or ``fp8``) has
    packed, by the names that they have in an unpacked folder. They are read when they are used.

    Packed weights become bfloat16, all others stay as they are. ConfigError for weights that are
    not packed as the method says.
    """
    tensors = open_tensors(base)
    weights = _in_mxfp4(tensors) if method == "mxfp4" else _in_fp8(tensors, _block_size(base))
    if not any(weight.scales for weight in weights.values()):
        raise ConfigError(
            f"{base!r}: config.json says that weights are packed by {method!r}, and no tensor is"
        )
    return weights


def write_unpacked(weights: Mapping[str, UnpackedWeight], base: str, folder: Path) -> None:
    """Write ``weights`` to ``folder``, and the other files of the local folder ``base``,
    ``config.json`` last.
    """
    empty = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for name, weight in weights.items()
    }
    shards = split_torch_state_dict_into_shards(empty, max_shard_size=_SHARD)
    for file, names in shards.filename_to_tensors.items():
        made = {name: weights[name].read().contiguous() for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})
        # safetensors makes files for their owner alone
        copymode(Path(base, _CONFIG), folder / file)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_others(Path(base), folder, str(_UNPACKED).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class UnpackedWeight:
    """A weight of the unpacked model."""

    file: Any
    """Open file with the tensor."""
    name: str
    """Name of the tensor, or of its packed numbers."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    scales: str | None = None
    """Name of its scales; None for a tensor that is not packed."""
    scales_file: Any = None
    block: tuple[int, int] | None = None
    """Rows and columns of a matrix that have a scale in common; None for MXFP4."""

    @property
    def nbytes(self) -> int:
        """Bytes of the unpacked weight."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the unpacked weight."""
        tensor: Tensor = self.file.get_tensor(self.name)
        if self.scales is None:
            return tensor
        scales = self.scales_file.get_tensor(self.scales)
        if self.block is None:
            return convert_moe_packed_tensors(tensor, scales, dtype=self.dtype)
        return _times_scales(tensor, scales, self.block).to(self.dtype)


def _in_mxfp4(tensors: Mapping[str, Any]) -> dict[str, UnpackedWeight]:
    """Return the weights of a model whose experts are packed by MXFP4 (OCP Microscaling Formats
    1.0): numbers of 4 bits, 32 of which have a scale in common.

    The folder has blocks [E, O, I / 32, 16] and scales [E, O, I / 32] of a parameter [E, I, O].
    """
    weights: dict[str, UnpackedWeight] = {}
    for name, file in tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors:
            continue
        if not name.endswith(_BLOCKS):
            weights[name] = _whole(name, file)
            continue
        scales = name.removesuffix(_BLOCKS) + _SCALES
        if scales not in tensors:
            raise ConfigError(f"the weights lack {scales!r}, the scales of {name!r}")
        experts, outputs, groups, half = file.get_slice(name).get_shape()
        weights[name.removesuffix(_BLOCKS)] = UnpackedWeight(
            file,
            name,
            (experts, groups * half * 2, outputs),
            _UNPACKED,
            scales=scales,
            scales_file=tensors[scales],
        )
    return weights


def _in_fp8(tensors: Mapping[str, Any], block: tuple[int, int] | None) -> dict[str, UnpackedWeight]:
    """Return the weights of a model whose matrices are packed by FP8 in blocks, as DeepSeek-V3 and
    Qwen3 publish it: ``X.weight`` [O, I] of 8 bits, and ``X.weight_scale_inv`` with the factor of
    each block of ``block`` rows and columns; None for one factor for the matrix.
    """
    weights: dict[str, UnpackedWeight] = {}
    for name, file in tensors.items():
        if name.endswith(_INVERSE_SCALE) and name.removesuffix(_INVERSE_SCALE) in tensors:
            continue
        if name.endswith(_ACTIVATIONS):
            continue
        scales = name + _INVERSE_SCALE
        if scales not in tensors:
            weights[name] = _whole(name, file)
            continue
        shape = tuple(file.get_slice(name).get_shape())
        of_one = shape if block is None else block
        if len(shape) != 2 or not _are_scales_of(
            tensors[scales].get_slice(scales).get_shape(), shape, of_one
        ):
            raise ConfigError(
                f"the scales {scales!r} {tensors[scales].get_slice(scales).get_shape()} are not "
                f"those of {name!r} "
                f"{[*shape]} in blocks of {[*of_one]} (weight_block_size of quantization_config)"
            )
        weights[name] = UnpackedWeight(
            file,
            name,
            shape,
            _UNPACKED,
            scales=scales,
            scales_file=tensors[scales],
            block=(of_one[0], of_one[1]),
        )
    return weights


def _whole(name: str, file: Any) -> UnpackedWeight:
    """Return a tensor that is not packed. ConfigError for one of a type that weights have not."""
    there = file.get_slice(name)
    dtype = STORED_TYPES.get(there.get_dtype())
    if dtype is None:
        raise ConfigError(
            f"the weight {name!r} is {there.get_dtype()} and has no scales that are known: "
            f"expected one of {', '.join(STORED_TYPES)}"
        )
    return UnpackedWeight(file, name, tuple(there.get_shape()), dtype)


def _block_size(base: str) -> tuple[int, int] | None:
    """Return rows and columns that have a factor in common, as ``config.json`` says; None for
    whole matrices.
    """
    packing = read_packing(base)
    size = _BLOCK if packing is None else packing.get("weight_block_size", _BLOCK)
    if size is None:
        return None
    rows, columns = size
    return int(rows), int(columns)


def _are_scales_of(scales: Sequence[int], matrix: Sequence[int], block: Sequence[int]) -> bool:
    """Return whether there is a scale for each block of a matrix, of which the last may be
    smaller.
    """
    return list(scales) == [-(-size // each) for size, each in zip(matrix, block, strict=True)]


def _times_scales(packed: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block of a matrix by its factor. [O, I], [ceil(O / rows), ceil(I / columns)]
    -> [O, I] float32.
    """
    rows, columns = packed.shape
    factors = (
        scales.float()
        .repeat_interleave(block[0], 0)[:rows]
        .repeat_interleave(block[1], 1)[:, :columns]
    )
    return packed.float() * factors
