"""Opens the ``*.safetensors`` of a model's folder on this machine, those that transformers would
read; weights are read when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import ModelUse, empty_model, read_config, understood
from siirl_dask.models.cache import check_no_adapters, folder_if_here
from siirl_dask.models.experts import joined
from siirl_dask.models.packed_weights import packing_of
from siirl_dask.models.remote import reached
from siirl_dask.models.shapes import (
    INDEX,
    StoredTensor,
    files_with_weights,
    sampled_bytes,
    stored_tensors,
)
from siirl_dask.models.weight_names import (
    Stored,
    described_parameters,
    lacking,
    read_stored,
    stored_parameters,
    tied_apart,
    tied_names,
    unfit,
)

UNUSED = ("pooler.",)
"""Beginnings of the names of parameters that an encoder's hidden states do not depend on."""
_NAMED = 4  # parameters in a message


def open_weights(path: str) -> dict[str, Any]:
    """Return the open file of each weight by its name; ``file.get_tensor(name)`` reads it. Empty
    without files.

    The experts' tensors of a mixture are joined, as its parameters are. ConfigError for unreadable
    files.
    """
    return joined(open_tensors(path))


def open_tensors(path: str) -> dict[str, Any]:
    """Return the open file of each tensor by its name, as ``open_weights`` does, but with
    nothing joined.
    """
    folder = Path(path)
    there = [file.name for file in folder.glob("*")]
    names = files_with_weights(path, there, lambda: (folder / INDEX).read_bytes())
    try:
        opened: list[Any] = [safe_open(folder / name, framework="pt") for name in names]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path={path!r}: its weights cannot be read: {error}") from error
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # the file is no mapping


def check_weights(path: str, use: ModelUse = ModelUse.GENERATES) -> None:
    """Check that the ``*.safetensors`` of the model at ``path``, on any fsspec URL, have each
    parameter of the model for ``use`` that its ``config.json`` describes, in its shape and as
    floating-point numbers, and nothing else for its layers.

    Does nothing without a ``config.json`` and for packed weights, and looks at no weights without
    such files.

    Raises:
        ConfigError: they do not, transformers has no such model, or adapters are beside it.
    """
    config = read_config(path)
    if config is None or packing_of(path) is not None:
        return
    check_no_adapters(path)
    model = understood(path, config, partial(empty_model, use=use))
    if model is None:
        code = ""
        if "auto_map" in config:
            code = ", and code in a model's folder is not run"
        raise ConfigError(
            f"model.path={path!r}: transformers has no {use} of the model_type "
            f"{config.get('model_type')!r} of its config.json{code}"
        )
    tensors = stored_tensors(path)
    if not tensors:
        return
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    unused = UNUSED if use is ModelUse.ENCODES else ()
    problems = [*lacking(model, shapes, unused), *unfit(model, tensors)]
    if problems:
        more = ""
        if len(problems) > _NAMED:
            more = f" and {len(problems) - _NAMED} more"
        raise ConfigError(
            f"model.path={path!r}: its *.safetensors are not of the model that its config.json "
            f"describes: {', '.join(problems[:_NAMED])}{more}"
        )
    check_tied(path, model)


def check_tied(path: str, model: PreTrainedModel) -> None:
    """Raise ConfigError where a model at ``path``, on any fsspec URL, has several tensors for a
    parameter of ``model``, which may be without memory, and they differ. Of files that have not come
    to this host samples are compared.
    """
    several = [names for names in tied_names(model).values() if len(names) > 1]
    if not several:
        return
    folder = folder_if_here(path)
    are_equal: Callable[[Stored, Stored], bool]
    if folder is None:
        tensors = stored_tensors(path)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        stored = described_parameters(model, shapes)
        are_equal = partial(_look_equal, path, tensors)
    else:
        stored = stored_parameters(model, open_tensors(folder))
        are_equal = _are_equal
    for names in several:
        there = [name for name in names if name in stored]
        for other in there[1:]:
            if not are_equal(stored[there[0]], stored[other]):
                raise tied_apart(f"model.path={path!r}", there[0], other)


def _are_equal(first: Stored, second: Stored) -> bool:
    return torch.equal(read_stored(first), read_stored(second))


def _look_equal(
    path: str, tensors: Mapping[str, StoredTensor], first: Stored, second: Stored
) -> bool:
    """Return whether samples of two tensors at a URL are equal. Tensors of other types, or that a
    parameter is made of, are compared where they have come.
    """
    one = tensors.get(first[0])
    other = tensors.get(second[0])
    if one is None or other is None or one.dtype != other.dtype:
        return True
    with reached(path):
        return sampled_bytes(one) == sampled_bytes(other)
