"""Engines over a model of transformers that end their own process, or raise, at a token; for tests of
engines in processes.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from siirl_dask.rollout import EngineSpec
from siirl_dask.rollout.specs import Abilities
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.vllm_engine.process_groups import EngineRanks
from siirl_dask.rollout.vllm_engine.tensor_parallel import (
    TensorParallelQueue,
    TensorParallelWeights,
)


class CrashingEngine(TransformersEngine):
    """``engine_options``: ``log``, a file with a line of seeds for each batch; ``marker``, a file,
    without which nothing happens; ``at``, the token at which something does, of those that a
    process draws while the file is there; ``stays``, whether it is there for the next process as
    well; ``raises``, an error in place of a kill; ``hangs``, whether it stands still in place of a
    kill; ``starts``, whether it has started a process of its own before.
    """

    def __init__(self, inputs):
        self.options = inputs.options
        self.tokens = 0
        super().__init__(
            inputs.model, max_rows=inputs.rollout.max_rows, progress=inputs.device.progress
        )

    def _generate_batch(self, requests, on_tokens=None, cut=None):
        with Path(self.options["log"]).open("a") as log:
            log.write(" ".join(str(request.seed) for request in requests) + "\n")
        return super()._generate_batch(requests, self._count, cut)

    def _count(self, drawn):
        marker = Path(self.options["marker"])
        if not marker.exists():
            return
        self.tokens += 1
        if self.tokens != self.options["at"]:
            return
        if not self.options["stays"]:
            marker.unlink(missing_ok=True)  # two processes may see it
        if self.options["raises"]:
            self.tokens = 0
            print("more than a pipe holds\n" * 2**13, flush=True)
            raise KeyError("a bug of the engine's")
        if self.options.get("hangs"):
            time.sleep(600)
        if self.options.get("starts"):
            subprocess.Popen(["sleep", "600"])
        print("the engine is about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class CrashingWeights:
    """New weights that end the process in place of being loaded, where the file ``marker`` is there, once
    another rank has loaded them: the file ``loaded`` beside it says so.
    """

    def __init__(self, weights, marker):
        self.arrived = weights.arrived
        self.own = weights
        self.marker = marker
        self.loaded = marker.with_name("loaded")

    def load(self):
        if self.marker.exists():
            self.marker.unlink()
            deadline = time.monotonic() + 60
            while not self.loaded.exists():
                assert time.monotonic() < deadline, "no other rank has loaded them"
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        self.own.load()
        self.loaded.touch()


class CrashingRanks(CrashingEngine):
    """One rank of an engine whose ranks sample all rows together, each with the whole model.
    ``start`` of ``engine_options`` is ``raises`` or ``killed``: what happens to the second rank as it is
    built, while the first one waits for it.
    """

    def __init__(self, inputs):
        self.ranks = EngineRanks(inputs.rank, inputs.rollout.tensor_parallel_size)
        start = inputs.options.get("start")
        if self.ranks.rank == 1 and start == "raises":
            raise MemoryError("the second device has no memory left")
        if self.ranks.rank == 1 and start == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self.ranks.gather(b"built")
        super().__init__(inputs)

    def serve(self, queue):
        super().serve(self._shared(queue))

    def serve_in_flight(self, queue, weights):
        shared = self._shared(queue)
        own = CrashingWeights(weights, Path(self.options["marker"]))
        together = TensorParallelWeights(own, shared.gather, lambda: self.version)
        super().serve_in_flight(shared, together)

    def _shared(self, queue):
        return TensorParallelQueue(
            queue,
            self.ranks.gather,
            rank=self.ranks.rank,
            size=self.ranks.size,
            version=self.version,
        )


class StagedEngine(TransformersEngine):
    """Names stages while it serves and while it loads weights."""

    def __init__(self, inputs):
        self.stage = inputs.device.stage
        super().__init__(inputs.model)

    def serve_in_flight(self, queue, weights):
        with self.stage("it serves"):
            super().serve_in_flight(queue, weights)

    def load_weights(self, tensors, version):
        with self.stage("it loads"):
            super().load_weights(tensors, version)


STAGED = EngineSpec(
    name="staged", build=StagedEngine, abilities=Abilities(process=True, in_flight=True)
)
RANKS = EngineSpec(
    name="ranks",
    build=CrashingRanks,
    abilities=Abilities(process=True, tensor_parallel=True, in_flight=True),
)
SPEC = EngineSpec(name="crashing", build=CrashingEngine, abilities=Abilities(process=True))
