"""An engine over a model of transformers that ends its own process, or raises, at a token; for tests of
engines in processes.
"""

import os
import signal
import subprocess
from pathlib import Path

from siirl_dask.rollout import EngineSpec
from siirl_dask.rollout.specs import Abilities
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine


class CrashingEngine(TransformersEngine):
    """``engine_options``: ``log``, a file with a line of seeds for each batch; ``at``, the token of
    all batches of a process at which something happens; ``marker``, a file, without which nothing
    does; ``stays``, whether the file is there for the next process as well; ``raises``, an error
    in place of a kill; ``starts``, whether it has started a process of its own before.
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
        self.tokens += 1
        marker = Path(self.options["marker"])
        if self.tokens != self.options["at"] or not marker.exists():
            return
        if not self.options["stays"]:
            marker.unlink(missing_ok=True)  # two processes may see it
        if self.options["raises"]:
            print("more than a pipe holds\n" * 2**13, flush=True)
            raise KeyError("a bug of the engine's")
        if self.options.get("starts"):
            subprocess.Popen(["sleep", "600"])
        print("the engine is about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


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
SPEC = EngineSpec(name="crashing", build=CrashingEngine, abilities=Abilities(process=True))
