"""The weights of ``model.path``, into which an engine merges adapters: they stay as they are, in
the folder's files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import Adapter, merge, pair
from siirl_dask.models.weight_files import open_weights
from siirl_dask.rollout.engine import WeightStream
from siirl_dask.rollout.weight_loading import WeightLoader


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """An engine computes with these beside the weights of its folder. Without any the weights
    are as they are.
    """

    by_weight: Mapping[str, Adapter] = field(default_factory=dict)
    """Adapters by the name of the weight that each changes, copies of their own."""
    scaling: float = 1.0
    version: int = 0


class MergesAdapters(ABC):
    """Takes adapters for an engine that has no layers for them: they are merged into the
    folder's weights.
    """

    _base: BaseWeights

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter."""

    def fit_adapters(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        scaling: float,
        version: int,
    ) -> Adapters:
        """Return a copy of adapters. ValueError for those that do not fit."""
        return self._base.fit(tensors, scaling, version)

    def load_adapters(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        scaling: float,
        version: int,
    ) -> None:
        """Merge adapters into the folder's weights, and load these; errors as ``load_weights``."""
        self.use_adapters(self.fit_adapters(tensors, scaling, version))

    def use_adapters(self, given: Adapters, agent: str = "") -> None:
        """Generate from now on with ``given``: whose they are does not matter."""
        self.load_weights(self._base.merged(given), given.version)


class BaseWeights:
    """Merges adapters into a folder's weights, one at a time; the files are opened at the first
    use.
    """

    def __init__(self, path: str, parameters: WeightLoader) -> None:
        self._path = path
        self._parameters = parameters

    def fit(self, tensors: Iterable[tuple[str, Tensor]], scaling: float, version: int) -> Adapters:
        """Return a copy of adapters. ValueError for those that do not fit."""
        return Adapters(pair(tensors, self._parameters.shapes, version), scaling, version)

    def merged(self, given: Adapters) -> WeightStream:
        """Return all weights of the files, those with an adapter merged with it in float32; each is
        read when it comes.

        ConfigError where the files lack a weight that has an adapter.
        """
        adapters = given.by_weight
        if lacking := sorted(adapters.keys() - self._files.keys()):
            raise ConfigError(
                f"model.path={self._path!r}: its *.safetensors lack {lacking[:3]}, which adapters "
                "are to be merged into; leave lora out of the options of publish_weights and "
                "load_weights, so that all weights travel"
            )

        files = self._files

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, (file, own) in files.items():
                weight = file.get_tensor(own)
                yield (
                    name,
                    merge(weight, adapters[name], given.scaling) if name in adapters else weight,
                )

        shapes = {name: file.get_slice(own).get_shape() for name, (file, own) in files.items()}
        return WeightStream(shapes, weights())

    @cached_property
    def _files(self) -> dict[str, tuple[Any, str]]:
        """The open file of each parameter, and its name there."""
        opened = open_weights(self._path)
        return {name: (opened[own], own) for name, own in self._parameters.in_files(opened).items()}
