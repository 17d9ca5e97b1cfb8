"""The weights of ``model.path``, into which an engine merges adapters: they stay as they are, in the folder's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor

from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import merge, pair
from siirl_dask.models.weight_files import open_weights
from siirl_dask.rollout.engine import WeightStream
from siirl_dask.rollout.weight_loading import WeightLoader


class BaseWeights:
    """Merges adapters into a folder's weights, one at a time; the files are opened at the first use."""

    def __init__(self, path: str, parameters: WeightLoader) -> None:
        self._path, self._parameters = path, parameters

    def merged(self, tensors: Iterable[tuple[str, Tensor]], scaling: float, version: int) -> WeightStream:
        """Return all weights of the files, those with an adapter merged with it in float32; each is read when it comes.

        ValueError for adapters that do not fit; ConfigError where the files lack a weight that has one.
        """
        adapters = pair(tensors, self._parameters.shapes, version)
        if lacking := sorted(adapters.keys() - self._files.keys()):
            raise ConfigError(
                f"model.path={self._path!r}: its *.safetensors lack {lacking[:3]}, which adapters are to be merged "
                "into; leave lora out of the options of publish_weights and load_weights, so that all weights travel"
            )

        files = {name: file for name, file in self._files.items() if self._parameters.knows(name)}

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, file in files.items():
                weight = file.get_tensor(name)
                yield name, merge(weight, adapters[name], scaling) if name in adapters else weight

        shapes = {name: file.get_slice(name).get_shape() for name, file in files.items()}
        return WeightStream(shapes, weights())

    @cached_property
    def _files(self) -> dict[str, Any]:
        return open_weights(self._path)
