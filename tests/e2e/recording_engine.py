"""An engine that takes its time for each token, and keeps every version of its weights."""

import time
from pathlib import Path

from safetensors.torch import save_file

from siirl_dask.rollout import Abilities, EngineSpec
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine


class RecordingEngine(TransformersEngine):
    def __init__(self, inputs):
        self._seconds = inputs.options["seconds"]
        self._folder = inputs.options["folder"]
        self._loading = False
        self._beat = inputs.device.progress
        model = inputs.model
        super().__init__(model, max_rows=inputs.rollout.max_rows, progress=self._take_time)
        self._keep()

    def load_weights(self, tensors, version):
        self._loading = True
        super().load_weights(tensors, version)
        self._loading = False
        self._keep()

    def _take_time(self):
        self._beat()
        if not self._loading:
            time.sleep(self._seconds)

    def _keep(self):
        weights = {
            name: weight.detach().clone()
            for name, weight in self._model.named_parameters(remove_duplicate=False)
        }
        save_file(weights, Path(self._folder) / f"{self.version}.safetensors")


def build(inputs):
    return RecordingEngine(inputs)


SPEC = EngineSpec(name="recording", build=build, abilities=Abilities(in_flight=True))
"""Options: ``seconds`` of a token, ``folder`` of the weights by version."""
