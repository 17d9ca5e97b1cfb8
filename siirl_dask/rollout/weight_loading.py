"""Checks the names and shapes of new weights against a model, before any is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from siirl_dask.errors import PeerError, RunError, SiirlError
from siirl_dask.models.loading import class_of_config
from siirl_dask.models.weight_files import open_tensors
from siirl_dask.models.weight_names import FileNames, renaming
from siirl_dask.rollout.engine import WeightStream


class Replacement:
    """Knows whether an engine's weights are whole: a library that fails half way has some of
    either version.
    """

    def __init__(self, library: str) -> None:
        """``library`` is named in errors."""
        self._library = library
        self.broken = False

    def check(self) -> None:
        """Raise RunError where weights were left half replaced."""
        if self.broken:
            raise RunError(
                f"{self._library} failed to load weights before; this engine cannot be used any "
                "more"
            )

    @contextmanager
    def to(self, version: int) -> Iterator[None]:
        """Replace the weights inside the block. RunError for what the library raises; errors of
        whoever sends the weights pass.
        """
        self.broken = True
        try:
            yield
        except SiirlError:
            raise
        except Exception as error:  # such libraries raise anything
            raise RunError(
                f"{self._library} could not load the weights of version {version}: {error}"
            ) from error
        self.broken = False


class WeightLoader:
    """Names and shapes of a model's parameters. Tied parameters go by the first of their names."""

    def __init__(self, model: PreTrainedModel, files: Mapping[str, Any] | None = None) -> None:
        """``files`` are the open files of the folder's tensors, by name: its buffers are read
        from them.
        """
        self._renamed = renaming(model)
        self._file_names = FileNames(model, files or {})
        parameters = dict(model.named_parameters(remove_duplicate=False))
        renamed = self._renamed(files or {})
        buffers = model.state_dict().keys() - parameters.keys()
        self._buffers = {
            name: file for name, file in (files or {}).items() if renamed.get(name) in buffers
        }
        first: dict[int, str] = {}
        self._names: dict[str, str] = {}
        self._shapes: dict[str, list[int]] = {}
        for name, parameter in parameters.items():
            self._names[name] = first.setdefault(id(parameter), name)
            self._shapes[self._names[name]] = list(parameter.shape)

    @classmethod
    def of_folder(cls, path: str) -> WeightLoader:
        """Read them from the model's config: no memory is used for weights. ConfigError for
        unreadable files.
        """
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            return cls(class_of_config(config).from_config(config), open_tensors(path))

    @property
    def shapes(self) -> Mapping[str, list[int]]:
        """Shapes of all parameters, by the first of their names."""
        return self._shapes

    def in_files(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name in a folder's files of each parameter that is there, by the
        parameter's first name.
        """
        return {
            self._names[own]: name
            for name, own in self._renamed(names).items()
            if own in self._names
        }

    def as_in_files(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights by the names, and in the parts, that a folder's files have, as other
        libraries load them; after them the buffers that are saved with weights, which no trainer
        changes.

        A library that makes its weights anew forgets buffers that do not come.
        """
        yield from self._file_names.of(weights)
        for name, file in self._buffers.items():
            yield name, file.get_tensor(name)

    def fit(
        self, tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over all weights, each under its first name.

        ValueError, before the first is yielded, naming what is missing, unknown or of another
        shape. The tensors of a WeightStream are yielded as they arrive; others are collected first.
        """
        if not isinstance(tensors, WeightStream):
            collected = dict(tensors)
            tensors = WeightStream(
                {name: tensor.shape for name, tensor in collected.items()}, collected.items()
            )
        self._check({name: list(shape) for name, shape in tensors.shapes.items()}, version)
        return self._by_first_name(tensors, version)

    def _check(self, shapes: Mapping[str, list[int]], version: int) -> None:
        known = {name: self._shapes[self._names[name]] for name in shapes if name in self._names}
        misshaped = [
            f"{name} {shapes[name]} for {own}" for name, own in known.items() if shapes[name] != own
        ]
        missing = self._shapes.keys() - {self._names[name] for name in known}
        wrong = {
            "missing": missing,
            "unknown": shapes.keys() - known.keys(),
            "misshaped": misshaped,
        }
        wrong = {kind: sorted(names) for kind, names in wrong.items() if names}
        if wrong:
            raise ValueError(f"weights of version {version} do not fit: {wrong}")

    def _by_first_name(self, weights: WeightStream, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter once. PeerError when other tensors arrive than were announced.

        Where a parameter arrives under several names, the last one counts.
        """
        last = {self._names[name]: name for name in weights.shapes}
        due = iter(weights.shapes.items())
        for name, tensor in weights:
            announced = next(due, ("no more", ()))
            if (name, list(tensor.shape)) != (announced[0], list(announced[1])):
                arrived = f"{name!r} of shape {list(tensor.shape)}"
                raise PeerError(
                    f"weights of version {version}: {arrived} came where {announced} was announced"
                )
            if last[self._names[name]] == name:
                yield self._names[name], tensor
        if rest := [name for name, _ in due]:
            raise PeerError(f"weights of version {version}: {rest} were announced and did not come")
