"""The methods that workers of a server need besides vLLM's own: one replaces all weights, or says
which it could not, and one says which model they are weights of.

    --worker-extension-cls siirl_dask.rollout.server_engine.extension.LoadsWeights

Runs in the server. vLLM's own ``reload_weights`` only warns of weights that it leaves as they were,
and on CPUs leaves a tied head and experts as they were, silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from siirl_dask.rollout.server_engine.same_model import read_config
from siirl_dask.rollout.vllm_engine.releases import reload_weights
from siirl_dask.rollout.vllm_engine.reloading import (
    NewWeights,
    layers_with_weights,
    nothing_left_out,
    pack_for_cpu,
)


class LoadsWeights:
    """Methods that vLLM adds to each of a server's workers."""

    device: Any
    model_config: Any
    model_runner: Any

    def load_siirl_weights(self, folder: str) -> None:
        """Replace every weight by those of the ``*.safetensors`` in ``folder``, by the names of a
        model's folder. RuntimeError, by name, for weights that stayed as they were.
        """
        model = self.model_runner.get_model()
        weights = NewWeights(_tensors(folder))
        with nothing_left_out(lambda: layers_with_weights(model)):
            reload_weights(self, weights_iterator=iter(weights))
        weights.copy_sinks(model)
        if torch.device(self.device).type == "cpu":
            pack_for_cpu(model)

    def siirl_model_config(self) -> dict[str, Any]:
        """Return the config of the model that the server was started with, as plain data."""
        started = self.model_config
        return read_config(started.hf_config_path or started.model, started.revision)


def _tensors(folder: str) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_tensor(name)
