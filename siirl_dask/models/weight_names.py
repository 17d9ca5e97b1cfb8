"""Weights in a folder's files by the names of a model's parameters, which some models keep
otherwise.

A Qwen2.5-VL has ``model.layers.0.*`` and ``visual.*`` in its files, and
``model.language_model.layers.0.*`` and ``model.visual.*`` in its modules; a Mixtral has three
matrices for each expert, and two parameters for all of them. transformers knows how the one follows
from the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from siirl_dask.errors import ConfigError
from siirl_dask.models.experts import apart_where, joined

if TYPE_CHECKING:
    from siirl_dask.models.shapes import StoredTensor

STORED_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of weights in files, by the names that safetensors gives them."""
Stored = tuple[str, Any]
"""Name of a weight in an open file, and that file; ``file.get_slice(name)`` reads it."""


def stored_parameters(model: PreTrainedModel, opened: Mapping[str, Any]) -> dict[str, Stored]:
    """Return where each parameter, or buffer, of a model is stored, given open files by the names
    of their weights.

    The model may be without memory. One that transformers makes of others is made when it is read,
    the whole of it.
    """
    found: dict[str, Stored] = {}
    made: dict[str, _Made] = {}
    there = dict.fromkeys(model.state_dict(), True)
    renamings, converters = _by_kind(get_model_conversion_mapping(model))
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    named = partial(
        _name_in_model,
        renamings=renamings,
        converters=converters,
        prefix=model.base_model_prefix,
        there=there,
    )
    opened = apart_where(lambda name: named(name)[0] not in there, opened)
    for name in sorted(opened, key=dot_natural_key):
        renamed, pattern = named(name)
        if pattern is None or name in there:
            found[name if pattern is not None else renamed] = (name, opened[name])
            continue
        converter = by_pattern[pattern]
        for target in converter.target_patterns:
            parameter = renamed.replace(converter.target_patterns[0], target)
            if parameter in there:
                making = made.setdefault(parameter, _Made(renamed, converter, model.config))
                making.sources.append((pattern, name, opened[name]))
    return found | {name: (name, making) for name, making in made.items()}


def lacking(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], unused: tuple[str, ...] = ()
) -> list[str]:
    """Return a clause for each parameter of a model, which may be without memory, and for each
    buffer that is saved with these, that files with tensors of these ``shapes``, by name, lack or
    have in another shape. Those whose names begin with one of ``unused`` may be lacking.
    """
    stored = described_parameters(model, shapes)
    ignored = [re.compile(rule) for rule in model._keys_to_ignore_on_load_missing or ()]
    ignored += [re.compile(f"^{re.escape(start)}") for start in unused]
    clauses = []
    names_by_first = tied_names(model)
    tied = {name for names in names_by_first.values() for name in names}
    state = model.state_dict()
    names_by_first |= {name: [name] for name in state.keys() - tied}
    for name, names in names_by_first.items():
        there = [each for each in names if each in stored]
        if not there and not any(rule.search(name) for rule in ignored):
            clauses.append(f"{name} is not there")
        expected = list(state[name].shape)
        for each in there:
            in_file, file = stored[each]
            try:
                shape = list(file.get_slice(in_file).get_shape())
            except RuntimeError:  # torch's, of tensors that a parameter is made of
                clauses.append(f"{each} cannot be made of the tensors that are there")
                continue
            if shape != expected:
                clauses.append(f"{in_file} has shape {shape} where {expected} was expected")
    return clauses


def described_parameters(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Stored]:
    """Return where each parameter, or buffer, is stored, as ``stored_parameters`` does, given the
    ``shapes`` of tensors in files by name: what is read of them has shapes alone.
    """
    return stored_parameters(model, joined(dict.fromkeys(shapes, _Headers(shapes))))


def parameter_types(
    model: PreTrainedModel, tensors: Mapping[str, StoredTensor]
) -> dict[str, torch.dtype]:
    """Return the type in which each parameter, or buffer, of a model is stored, given the tensors in
    files by name: the finest of those that it is made of. The model may be without memory.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    headers = _Headers(shapes, {name: tensor.dtype for name, tensor in tensors.items()})
    stored = stored_parameters(model, joined(dict.fromkeys(tensors, headers)))
    types = {name: read_stored(each).dtype for name, each in stored.items()}
    for names in tied_names(model).values():
        there = [types[name] for name in names if name in types]
        if there:
            types |= dict.fromkeys(names, there[0])
    return types


def finer(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return which of two floating-point types has smaller steps."""
    if torch.finfo(second).eps < torch.finfo(first).eps:
        return second
    return first


def tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return all names of each parameter of a model by the first: tied ones have several."""
    names: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(parameter), name)
        names.setdefault(own, []).append(name)
    return names


def tied_apart(subject: str, first: str, other: str) -> ConfigError:
    """Return the error for a model whose files have two tensors, which differ, for one parameter
    of two names: some libraries would load one, and some both.
    """
    return ConfigError(
        f"{subject}: its config.json says that {first} and {other} are one parameter "
        "(tie_word_embeddings), and its files have two tensors for it that differ: set "
        f"tie_word_embeddings to false there if both were trained, or take {other} out"
    )


class _Headers:
    """Stands for open files of which the shapes of tensors are known, and may be their types."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._shapes = shapes
        self._types = types
        self._name = ""

    def get_slice(self, name: str) -> _Headers:
        self._name = name
        return self

    def get_shape(self) -> list[int]:
        return list(self._shapes[self._name])

    def get_tensor(self, name: str) -> Tensor:
        kind = STORED_TYPES.get(self._types.get(name, ""), torch.float32)
        return torch.empty(self._shapes[name], dtype=kind, device="meta")

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        return self.get_tensor(self._name)[places]


def read_stored(stored: Stored) -> Tensor:
    """Read the whole of a tensor, as ``stored_parameters`` found it."""
    name, file = stored
    part = file.get_slice(name)
    tensor: Tensor = part[tuple(slice(0, size) for size in part.get_shape())]
    return tensor


def unknown_names(model: PreTrainedModel, in_files: Iterable[str]) -> list[str]:
    """Return the names in a folder's files of what a model has not, and makes no parameter of: a
    tower's weights where the model is of text alone, or heads for several tokens.
    """
    return [name for name, _, is_known in _as_parameters(model, in_files) if not is_known]


def unfit(model: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return a clause for each tensor of a folder's files that transformers would load, or leave
    out, so that another model is computed than the one that was saved.

    Those are numbers that need scales where none are applied, as of weights in 8 bits, and a bias
    or scales of a layer which the model, that may be without memory, has without them.
    """
    state = model.state_dict()
    with_parameters = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    rules = [re.compile(rule) for rule in model._keys_to_ignore_on_load_unexpected or ()]
    buffers = {name for name, _ in model.named_buffers()}
    clauses = []
    for name, renamed, is_known in _as_parameters(model, tensors):
        fault = tensors[name].type_fault
        own = state.get(renamed, state.get(name))
        if is_known and fault and (own is None or own.is_floating_point()):
            clauses.append(f"{name} {fault}, and there is no quantization_config")
        in_layer = renamed.rpartition(".")[0] in with_parameters
        if is_known or not in_layer or renamed in buffers:
            continue
        if not any(rule.search(renamed) for rule in rules):
            clauses.append(f"{name} is there, and the layer of that name has none")
    return clauses


def _as_parameters(
    model: PreTrainedModel, in_files: Iterable[str]
) -> Iterator[tuple[str, str, bool]]:
    """Yield each name in files, the name that transformers gives it, and whether the model has a
    parameter or buffer of it.
    """
    there = dict.fromkeys(model.state_dict(), True)
    renamings, converters = _by_kind(get_model_conversion_mapping(model))
    for name in in_files:
        renamed, _ = _name_in_model(name, renamings, converters, model.base_model_prefix, there)
        yield name, renamed, renamed in there or name in there


def _name_in_model(
    name: str,
    renamings: list[WeightRenaming],
    converters: list[WeightConverter],
    prefix: str,
    there: dict[str, bool],
) -> tuple[str, str | None]:
    """Return the name that ``from_pretrained`` gives a tensor of a file, and the pattern of the
    converter that makes others of it; None: it is taken as it is.

    A rule of names may be for others: DeepSeek-V4's last norm would get the name of one in a layer.
    Where the model has nothing of the new name, and has the old one, that stays.
    """
    renamed, pattern = rename_source_key(name, renamings, converters, prefix, there)
    if renamed not in there and name in there:
        return rename_source_key(name, [], [], prefix, there)
    return renamed, pattern


class _Made:
    """Stands for the open file of a parameter that is made of others, and for its slice."""

    def __init__(self, first: str, converter: WeightConverter, config: Any) -> None:
        """``first`` is the name of the first parameter that ``converter`` makes of the same
        weights.
        """
        self.sources: list[tuple[str, str, Any]] = []
        """The converter's pattern of each weight, the weight's name in its file, and the open
        file."""
        self._first = first
        self._converter = converter
        self._config = config
        self._made: dict[str, Tensor] = {}
        self._name = first

    def get_slice(self, name: str) -> _Made:
        self._name = name
        return self

    def get_shape(self) -> list[int]:
        """Make the parameter, which stays in memory until it is read."""
        converter = deepcopy(self._converter)
        for pattern, name, file in self.sources:
            converter.add_tensor(
                self._first, name, pattern, cast(Any, partial(file.get_tensor, name))
            )
        self._made = converter.convert(self._first, config=self._config)
        return list(self._made[self._name].shape)

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        if not self._made:
            self.get_shape()
        part = self._made[self._name][places].clone()
        self._made = {}
        return part


def parameter_names(model: PreTrainedModel, in_files: Iterable[str]) -> dict[str, str]:
    """Return the parameter's name for each name in a folder's files, as ``from_pretrained`` finds
    it.

    A tensor that is joined with others, or split, to make a parameter is left out.
    """
    return renaming(model)(in_files)


def renaming(model: PreTrainedModel) -> Callable[[Iterable[str]], dict[str, str]]:
    """Return ``parameter_names`` of a model, as a function that does not keep it alive."""
    there = dict.fromkeys(model.state_dict(), True)
    return partial(_renamed, get_model_conversion_mapping(model), model.base_model_prefix, there)


def _renamed(
    changes: list[WeightTransform],
    prefix: str,
    there: dict[str, bool],
    in_files: Iterable[str],
) -> dict[str, str]:
    renamings, converters = _by_kind(changes)
    found = {}
    for name in in_files:
        renamed, converter = _name_in_model(name, renamings, converters, prefix, there)
        if converter is None:
            found[name] = renamed
    return found


class FileNames:
    """Turns parameters of a model into the weights that its files have, as ``save_pretrained``
    does, one after the other: names that differ, and experts apart that are one parameter.

    Where the names of a folder's files are known, those count: the text of an image-text model,
    which is a model of its own to transformers, is called ``model.language_model.*`` there, and
    experts that are one tensor there stay one.
    """

    def __init__(self, model: PreTrainedModel, in_files: Iterable[str] = ()) -> None:
        """The model may be without memory, and is not kept alive. ``in_files`` are the names in
        the folder's files; none: they are not known.
        """
        there = tuple(in_files)
        self._there = {own: name for name, own in parameter_names(model, there).items()}
        changes = get_model_conversion_mapping(model, add_legacy=False)
        changes = [
            change.reverse_transform()
            for change in reversed(changes)
            if not isinstance(change, PrefixChange) or _removes_prefix(change, there)
        ]
        self._renamings, self._converters = _by_kind(changes)
        self._by_pattern = {
            pattern: converter
            for converter in self._converters
            for pattern in converter.source_patterns
        }
        self._config = model.config

    def of(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their names in files. One that is made of several parameters
        waits for all of them.
        """
        waiting: dict[str, WeightConverter] = {}
        for name, tensor in parameters:
            if name in self._there:
                yield self._there[name], tensor
                continue
            renamed, pattern = rename_source_key(
                name, self._renamings, self._converters, reverse=True
            )
            if pattern is None:
                yield renamed, tensor
                continue
            converter = waiting.setdefault(renamed, deepcopy(self._by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, cast(Any, tensor))
            if len(converter.collected_tensors) == len(converter.source_patterns):
                yield from self._converted(waiting.pop(renamed), renamed)
        for renamed, converter in waiting.items():
            yield from self._converted(converter, renamed)

    def _converted(self, converter: WeightConverter, renamed: str) -> Iterator[tuple[str, Tensor]]:
        for name, made in converter.convert(renamed, config=self._config).items():
            yield name, made[0] if isinstance(made, list) else made


def _removes_prefix(change: PrefixChange, in_files: Iterable[str]) -> bool:
    """Return whether a change takes a prefix away that names in files have."""
    if change.prefix_to_remove is None:
        return False
    return any(change.rename_source_key(name)[1] is not None for name in in_files)


def _by_kind(
    changes: Iterable[WeightTransform],
) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return transformers' changes to stored weights apart: those of names alone, and those of
    tensors.
    """
    renamings: list[WeightRenaming] = []
    converters: list[WeightConverter] = []
    for change in changes:
        if isinstance(change, WeightConverter):
            converters.append(change)
        elif isinstance(change, WeightRenaming):
            renamings.append(change)
    return renamings, converters
