"""Reads a model's size from its folder: parameters from the headers of its weight files, or where
it has none from its config; widths from its config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import open_fs

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import completed, read_config, shapes_by_config, understood
from siirl_dask.models.cache import open_model
from siirl_dask.models.remote import reached, tag_of

_LAYER = re.compile(r"^.*\blayers\.\d+\.")
_OF_EXPERTS = ".experts."
_STREAMS = 8  # headers read at once
_LARGEST_HEADER = 10**8  # bytes, a limit of the safetensors specification
_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
# as Qwen, Mixtral and DeepSeek name them
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of a model's parameters."""

    total: int
    """Elements of all tensors."""
    tensors: int
    """Number of tensors."""
    largest: int
    """Elements of the largest tensor."""
    layer: int = 0
    """Elements of the largest layer; 0 where names do not tell layers apart."""
    experts: int = 0
    """Elements of the experts of mixtures, without their routers."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of a model's layers, which workers that split them must divide; None where its
    config does not say.
    """

    heads: int | None
    """Attention heads."""
    kv_heads: int | None
    """Heads of keys and values."""
    intermediate: int | None
    """Width of each layer's MLP."""
    vocabulary: int | None
    """Tokens of the vocabulary."""
    experts: int | None = None
    """Experts of each layer of a mixture."""


def count_parameters(path: str) -> ModelSize | None:
    """Count the parameters of the model in a folder, on any fsspec URL: in its ``*.safetensors``,
    or where it has none, as its ``config.json`` says. None without either. ConfigError for damaged
    ones.
    """
    sizes = {name: prod(shape) for name, shape in parameter_shapes(path).items()}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if match := _LAYER.search(name):
            layers[match[0]] = layers.get(match[0], 0) + size
    layer = max(layers.values(), default=0)
    experts = sum(size for name, size in sizes.items() if _OF_EXPERTS in name)
    return (
        ModelSize(sum(sizes.values()), len(sizes), max(sizes.values()), layer, experts)
        if sizes
        else None
    )


def parameter_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a folder's model by name, from its weights or else
    from its config.
    """
    shapes = weight_shapes(path)
    return shapes if shapes else shapes_by_config(path)


def weight_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a folder's ``*.safetensors``, by name; empty without
    such files.
    """
    with reached(path):
        fs, folder = open_model(path)
        try:
            listed = fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {
            str(info["name"]): info for info in listed if str(info["name"]).endswith(".safetensors")
        }
        if isinstance(fs, LocalFileSystem):
            return dict(shape for name in found for shape in _shapes_in(fs, name))
        with ThreadPoolExecutor(_STREAMS) as pool:
            names = [fs.unstrip_protocol(name) for name in found]
            return dict(
                chain.from_iterable(pool.map(_shapes_at, names, map(tag_of, found.values())))
            )


def shapes_in_file(url: str, subject: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in one ``.safetensors`` file, on any fsspec URL. ConfigError,
    beginning with ``subject``, for one that cannot be read.
    """
    try:
        fs, path = open_fs(url)
        return dict(_shapes_in(fs, path))
    except Exception as error:  # drivers of remote storage raise what they like
        raise ConfigError(f"{subject}: {url} cannot be read: {error}") from error


@lru_cache(maxsize=4096)  # a run asks for each role, and again for each worker's memory
def _shapes_at(url: str, tag: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Read the header of a file at a URL, whose ``tag`` would be another one if it had changed."""
    return tuple(_shapes_in(*open_fs(url)))


def _shapes_in(fs: Any, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Read one file's header: its length in 8 bytes little-endian, then JSON."""
    try:
        with fs.open(name, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        yield from [
            (key, tuple(map(int, tensor["shape"])))
            for key, tensor in header.items()
            if key != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {name} is no safetensors file: {error}") from error


def read_widths(path: str) -> Widths | None:
    """Read widths from a folder's ``config.json``, on any fsspec URL; None without one.
    ConfigError if damaged.
    """
    config = read_config(path)
    return None if config is None else understood(path, config, _widths)


def _widths(config: Mapping[str, Any]) -> Widths:
    text = config.get("text_config", config)
    found = text if all(map(text.get, _WIDTHS)) else completed(config) or config
    return Widths(
        heads=_whole(found.get("num_attention_heads")),
        kv_heads=_whole(found.get("num_key_value_heads")),
        intermediate=_whole(found.get("intermediate_size")),
        vocabulary=_whole(found.get("vocab_size")),
        experts=next((text[name] for name in _EXPERTS if isinstance(text.get(name), int)), None),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
