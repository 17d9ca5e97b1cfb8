"""How large a model is, from its folder: parameters by the headers of its weight files, widths by its config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from siirl_storage import open_fs

from siirl_dask.errors import ConfigError

_LAYER = re.compile(r"^.*\blayers\.\d+\.")
_LARGEST_HEADER = 10**8  # bytes, by the specification of safetensors
_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How many numbers, in how many tensors, and how many of them in the largest."""

    total: int
    tensors: int
    largest: int
    layer: int = 0
    """In the largest of its layers, where names tell them apart."""


@dataclass(frozen=True, slots=True)
class Widths:
    """What workers that share a model's layers must divide; None for what its config does not know."""

    heads: int | None
    kv_heads: int | None
    intermediate: int | None
    """Of the MLP of each layer."""
    vocabulary: int | None


def count_parameters(path: str) -> ModelSize | None:
    """Of the ``*.safetensors`` in a folder, on any fsspec URL; None when there are none. ConfigError for damage."""
    sizes = {name: prod(shape) for name, shape in weight_shapes(path).items()}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if found := _LAYER.search(name):
            layers[found[0]] = layers.get(found[0], 0) + size
    layer = max(layers.values(), default=0)
    return ModelSize(sum(sizes.values()), len(sizes), max(sizes.values()), layer) if sizes else None


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


def read_widths(path: str) -> Widths | None:
    """Of a folder, on any fsspec URL; None when it has no ``config.json``. ConfigError for damage."""
    fs, folder = open_fs(path)
    if not fs.exists(file := f"{folder}/config.json"):
        return None
    try:
        given = json.loads(fs.cat_file(file))
        said = given.get("text_config", given)
        found = said if all(map(said.get, _WIDTHS)) else _with_defaults(given)
    except Exception as error:  # what transformers raises for a config that it refuses is of many kinds
        raise ConfigError(f"model.path={path!r}: its config.json cannot be read: {error}") from error
    return Widths(*(value if isinstance(value := found.get(name), int) else None for name in _WIDTHS))


def _with_defaults(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers makes of a config that leaves some of them out, or has other names for them."""
    from transformers import CONFIG_MAPPING  # two seconds, which most configs need not

    if given.get("model_type") not in CONFIG_MAPPING:
        return given
    config = CONFIG_MAPPING[given["model_type"]].from_dict(dict(given)).get_text_config()
    return {name: getattr(config, name, None) for name in _WIDTHS}
