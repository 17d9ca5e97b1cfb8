"""How many parameters a model has, from the headers of its weight files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from siirl_storage import open_fs

from siirl_dask.errors import ConfigError

_LAYER = re.compile(r"^.*\blayers\.\d+\.")
_LARGEST_HEADER = 10**8  # bytes, by the specification of safetensors


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many numbers, in how many tensors, and how many of them in the largest."""

    total: int
    tensors: int
    largest: int
    layer: int = 0
    """In the largest of its layers, where names tell them apart."""


def count_parameters(path: str) -> Parameters | None:
    """Of the ``*.safetensors`` in a folder, on any fsspec URL; None when there are none. ConfigError for damage."""
    sizes = {name: prod(shape) for name, shape in weight_shapes(path).items()}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if found := _LAYER.search(name):
            layers[found[0]] = layers.get(found[0], 0) + size
    layer = max(layers.values(), default=0)
    return Parameters(sum(sizes.values()), len(sizes), max(sizes.values()), layer) if sizes else None


def weight_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """By name, of the same; empty when there are none."""
    fs, folder = open_fs(path)
    return dict(found for name in fs.glob(f"{folder}/*.safetensors") for found in _in_file(fs, name))


def _in_file(fs: Any, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Such a file begins with the length of its header, 8 bytes little-endian, and the header, JSON."""
    try:
        with fs.open(name, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        yield from [(key, tuple(map(int, it["shape"]))) for key, it in header.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {name} is no safetensors file: {error}") from error
