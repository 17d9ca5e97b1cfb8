"""Engines that take their time for each token, and keep every version of their weights."""

import os
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from siirl_dask.rollout import Abilities, EngineSpec
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.vllm_engine.spec import SPEC as VLLM_SPEC


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


def build_vllm(inputs):
    from siirl_dask.rollout.vllm_engine.engine import VllmEngine

    folder = Path(inputs.options["folder"])
    seconds = inputs.options["seconds"]

    class RecordingRank(VllmEngine):
        """The first rank keeps the weights, which are whole on each of them."""

        def load_weights(self, tensors, version):
            weights = {name: weight.clone() for name, weight in tensors}
            if inputs.rank.rank == 0:
                save_file(weights, folder / f"{version}.safetensors")
            super().load_weights(weights.items(), version)

    def take_time():
        inputs.device.progress()
        time.sleep(seconds)

    shutil.copy(Path(inputs.model.path) / "model.safetensors", folder / "0.safetensors")
    options = replace(inputs.rollout.vllm, kv_cache_memory="64MiB")
    return RecordingRank(
        inputs.model,
        replace(inputs.rollout, vllm=options, engine="vllm", engine_options={}),
        device=replace(inputs.device, progress=take_time),
        rank=inputs.rank,
    )


def build_failing(inputs):
    """``fails`` says what happens to the second rank while the first waits for it."""
    from siirl_dask.rollout.vllm_engine.engine import VllmEngine

    second = inputs.rank.rank == 1
    fails = inputs.options["fails"]

    @contextmanager
    def stage(name):
        if second and fails == "killed" and name == "vLLM makes its cache":
            os.kill(os.getpid(), signal.SIGKILL)
        with inputs.device.stage(name):
            yield

    cache = "200TiB" if second and fails == "memory" else "64MiB"
    options = replace(inputs.rollout.vllm, kv_cache_memory=cache)
    return VllmEngine(
        inputs.model,
        replace(inputs.rollout, vllm=options, engine="vllm", engine_options={}),
        device=replace(inputs.device, stage=stage),
        rank=inputs.rank,
    )


FAILING = replace(VLLM_SPEC, name="failing vllm", build=build_failing)
VLLM = replace(VLLM_SPEC, name="recording vllm", build=build_vllm)
"""Options as those of ``SPEC``."""
