"""An engine in a process of its own, which the worker has started: what ends that process does not
end the worker.

A process that is gone is started again, gets the weights in use, and is asked again for the responses
that were under way. A token depends on its row's seed, its position and the weights, so no sample
changes; responses that were delivered are not asked for again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siirl_dask.context import ArrivingWeights, HoldsNoGroups
from siirl_dask.devices import accelerator
from siirl_dask.errors import PeerError, RunError, counted
from siirl_dask.models.adapters import WEIGHT, A, Adapter, B
from siirl_dask.models.routing import needed_routing
from siirl_dask.rollout.base_weights import Adapters, BaseWeights, MergesAdapters
from siirl_dask.rollout.engine import (
    Generation,
    RequestQueue,
    RowPasses,
    Sampling,
    Tokenizer,
    serve_all,
)
from siirl_dask.rollout.model_folder import read_model_folder
from siirl_dask.rollout.process_engine.described_inputs import describe
from siirl_dask.rollout.process_engine.frames import ProcessLostError
from siirl_dask.rollout.process_engine.nameless_file import NamelessFile
from siirl_dask.rollout.process_engine.process import EngineProcess
from siirl_dask.rollout.process_engine.served_requests import ServedRequests
from siirl_dask.rollout.specs import EngineInputs, EngineSpec
from siirl_dask.rollout.weight_loading import Replacement

logger = logging.getLogger("siirl_dask.rollout")
_FRUITLESS = 2
"""Processes that are lost one after the other without a response in between, which ends the run."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightsInUse:
    """Weights or adapters in use, and the command by which a process gets them."""

    command: str
    value: list[Any]
    file: NamelessFile


@dataclass(slots=True)
class OwnedProcess:
    """The process that an engine has now, and the weights that the next one must get as well."""

    process: EngineProcess | None = None
    weights: WeightsInUse | None = None
    """None: those of the model's folder, which a process has when it is built."""

    def use(self, weights: WeightsInUse | None) -> None:
        """Replace the weights that a process must have."""
        if self.weights is not None:
            self.weights.file.close()
        self.weights = weights

    def close(self) -> None:
        """End the process, and free the weights."""
        if self.process is not None:
            self.process.end()
        self.process = None
        self.use(None)


class ProcessEngine(MergesAdapters, HoldsNoGroups):
    """A RolloutEngine over the one that a spec builds, in a process of its own. Errors are those of
    that engine; RunError, with the process's last words, where two processes in a row are lost
    without a response.
    """

    def __init__(self, spec: EngineSpec, inputs: EngineInputs) -> None:
        """``inputs.model.path`` is a folder of this host."""
        folder = read_model_folder(inputs.model)
        rollout = inputs.rollout
        self.tokenizer: Tokenizer = folder.tokenizer
        self.processor = inputs.processor
        self.routing = needed_routing(inputs.model.path) if rollout.router_replay else None
        self._parameters = folder.parameters
        self._base = BaseWeights(inputs.model.path, self._parameters)
        self._device = inputs.device
        name = rollout.engine if ":" in rollout.engine else spec.name
        self._described = describe(
            name,
            inputs,
            threads=torch.get_num_threads(),
            log_level=logger.getEffectiveLevel(),
        )
        self._defaults = spec.environment
        self._reads_urls = inputs.processor is not None  # images at URLs, perhaps with a login
        self._owned = OwnedProcess()
        self._finish = weakref.finalize(self, self._owned.close)  # also where nobody calls close()
        self._lost_in_a_row = 0
        self._asleep = False
        self._passes: RowPasses | None = RowPasses() if rollout.draft_tokens else None
        self._replacement = Replacement("the engine's process")
        self.context_length: int | None = None
        self.version = 0
        self._ready()

    @property
    def pid(self) -> int | None:
        """Number of the process; None where it is gone, and the next is not started yet."""
        process = self._owned.process
        return None if process is None else process.pid

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Generation]:
        """Return one response per prompt, in order. ValueError for a prompt without tokens."""
        return serve_all(self, prompts, seeds, sampling)

    def serve(self, queue: RequestQueue) -> None:
        """Generate until the queue is empty, as the engine does."""
        self._serve(queue, None)

    def serve_in_flight(self, queue: RequestQueue, weights: ArrivingWeights) -> None:
        """Generate until the queue is empty, and load weights that arrive between two tokens. Rows
        that a lost process had under way begin again, with the newest weights.
        """
        self._serve(queue, weights)

    def _serve(self, queue: RequestQueue, weights: ArrivingWeights | None) -> None:
        self._replacement.check()
        self._begin()
        served = ServedRequests(queue, lambda: self.version, weights, self._made_progress)
        while True:
            process = self._ready()
            try:
                passes = process.command("serve", weights is not None, answers=served.answer)
            except ProcessLostError:
                again = counted(served.ask_again(), "response")
                self._lost(process, f"{again} that it had under way will be generated again")
                continue
            self._count(passes)
            return

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter. ValueError, before anything changes, if the names or shapes do
        not fit; RunError where the engine fails half way.

        All weights are in this host's memory once more from then on, for a process that is started
        again.
        """
        self._replacement.check()
        weights = self._parameters.fit(tensors, version)
        with self._replacement.to(version):
            self._owned.use(None)  # first: two versions may not fit into memory
            file = self._written(weights)
            self._put(WeightsInUse("load weights", [version, file.entries], file))
        self.version = version

    def use_adapters(self, given: Adapters, agent: str = "") -> None:
        """Generate from now on with ``given``, which are those of ``agent``: the engine in the process
        takes them as it does, merged or in layers.
        """
        self._replacement.check()
        with self._replacement.to(given.version):
            self._owned.use(None)
            file = self._written(_by_name(given.by_weight))
            value = [agent, float(given.scaling), given.version, file.entries]
            self._put(WeightsInUse("use adapters", value, file))
        self.version = given.version

    def take_passes(self) -> RowPasses | None:
        """Return the passes over rows with drafts since this was called last; None without
        drafts.
        """
        passes = self._passes
        if passes is not None:
            self._passes = RowPasses()
        return passes

    def sleep(self, *, weights_follow: bool = False) -> None:
        """Free device memory, as the engine does. A process that is gone has none."""
        process = self._owned.process
        if process is None:
            return
        self._lost_in_a_row = 0
        try:
            process.command("sleep", weights_follow)
        except ProcessLostError:
            self._lost(process, "it was to sleep, and held no response")
        self._asleep = True

    def leave_groups(self) -> bool:
        """Return whether the engine can go on: not with half of its weights."""
        return not self._replacement.broken

    def close(self) -> None:
        """End the process; the engine cannot be used any more."""
        self._finish()

    def _written(self, tensors: Iterable[tuple[str, Tensor]]) -> NamelessFile:
        """Return a file with tensors."""
        file = NamelessFile()
        try:
            file.write(tensors, self._device.progress)
        except BaseException:
            file.close()
            raise
        return file

    def _put(self, weights: WeightsInUse) -> None:
        """Have the process use these weights, and every later one."""
        self._begin()
        self._owned.use(weights)
        self._ready()

    def _begin(self) -> None:
        """Prepare for a call that wakes the engine."""
        self._lost_in_a_row = 0
        if self._asleep:  # what torch holds here for later is memory of the same device
            accelerator.free_cache(self._device.kind)
        self._asleep = False

    def _ready(self) -> EngineProcess:
        """Return a process that has the weights in use; starts one where there is none."""
        while True:
            process = self._owned.process
            try:
                if process is None:
                    process = self._start()
                wanted = self._owned.weights
                if wanted is not None and process.holds is not wanted:
                    process.command(wanted.command, wanted.value, file=wanted.file.descriptor)
                    process.holds = wanted
            except ProcessLostError:
                assert process is not None
                self._lost(process, "it was loading weights, which the next one loads")
                continue
            return process

    def _start(self) -> EngineProcess:
        """Start a process and build the engine there. RunError where that ends it."""
        process = EngineProcess(self._device, self._defaults, with_secrets=self._reads_urls)
        try:
            with self._device.stage("a process for the engine starts"):
                facts = process.command("build", self._described)
        except ProcessLostError as error:
            raise RunError(
                f"the process of the engine (rollout.process=true) {process.how_it_ended()}\n"
                "It was building the engine: look for what ended it, such as too little memory"
            ) from error
        except BaseException:
            process.end()
            raise
        match facts:
            case {"context_length": None | int() as length}:
                self.context_length = length
            case _:
                process.end()
                raise PeerError(f"the engine's process described its engine as {facts!r:.200}")
        self._owned.process = process
        return process

    def _lost(self, process: EngineProcess, doing: str) -> None:
        """Note that a process is gone. RunError where it is the second in a row."""
        if self._owned.process is not process:  # it was noticed before, as weights came in flight
            return
        self._owned.process = None
        self._lost_in_a_row += 1
        ended = process.how_it_ended()
        if self._lost_in_a_row >= _FRUITLESS:
            raise RunError(
                f"the process of the engine (rollout.process=true) {ended}\n"
                f"{_FRUITLESS} processes in a row have ended so, without a response in between: "
                "remove what ends them, and resume the run"
            )
        logger.warning("the process of the engine %s\nAnother one is started: %s", ended, doing)

    def _made_progress(self) -> None:
        self._lost_in_a_row = 0

    def _count(self, passes: object) -> None:
        """Add the passes of a call."""
        match passes:
            case [int(tokens), int(number)]:
                before = self._passes if self._passes is not None else RowPasses()
                self._passes = RowPasses(before.tokens + tokens, before.passes + number)


def _by_name(adapters: Mapping[str, Adapter]) -> Iterator[tuple[str, Tensor]]:
    """Yield both halves of each adapter under its own name."""
    for weight, adapter in adapters.items():
        layer = weight.removesuffix(WEIGHT)
        yield layer + A, adapter.a
        yield layer + B, adapter.b
