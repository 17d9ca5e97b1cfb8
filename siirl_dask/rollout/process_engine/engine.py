"""An engine in a process of its own, which the worker has started: what ends that process does not
end the worker.

A process that is gone is started again when something is to be generated, gets the weights in use, and
is asked again for the responses that were under way. A token depends on its row's seed, its position
and the weights, so no sample changes; responses that were delivered are not asked for again.

An engine of several ranks has a process for each, beside the worker whose device it computes on. They
are lost together (``ranks.py``), and each worker asks again for the responses that it lacks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from siirl_dask.context import ArrivingWeights, HoldsNoGroups
from siirl_dask.devices import accelerator
from siirl_dask.errors import ConfigError, PeerError, RunError, counted
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
from siirl_dask.rollout.process_engine.ranks import AnotherRankEndedError, CallEnd, EngineWorkers
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
        self._workers = EngineWorkers(inputs.rank, rollout.tensor_parallel_size)
        self._owned = OwnedProcess()
        self._finish = weakref.finalize(self, self._owned.close)  # also where nobody calls close()
        self._end_of_last = ""
        self._lost_in_a_row = 0
        self._asleep = False
        self._passes: RowPasses | None = RowPasses() if rollout.draft_tokens else None
        self._replacement = Replacement("the engine's process")
        self.context_length: int | None = None
        self.version = 0
        self._start_together()

    @property
    def pid(self) -> int | None:
        """Number of the process; None where it is gone, and the next is not started yet."""
        process = self._owned.process
        if process is None:
            return None
        return process.pid

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
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
        self._lost_in_a_row = 0
        self._wake()
        served = ServedRequests(queue, lambda: self.version, weights)

        def check_queue() -> None:
            queue.ended()

        def check() -> None:
            check_queue()
            self._workers.check()

        # ranks begin together: where one has lost its process meanwhile, the others start anew too
        outcome = CallEnd.DONE if self._is_running() else CallEnd.LOST
        outcomes = self._workers.agree(
            outcome, delivered=False, version=self.version, check=check_queue
        )
        if not outcomes.done and self._owned.process is not None:
            self._drop_lost()
        while True:
            before = served.delivered
            error: RunError | ConfigError | None = None
            try:
                process = self._ready(check)
                passes = process.command(
                    "serve", weights is not None, answers=served.answer, check=check
                )
                self._count(passes)
                outcome = CallEnd.DONE
            except ProcessLostError:
                self._workers.note_end()
                outcome = CallEnd.LOST
            except AnotherRankEndedError:
                outcome = CallEnd.FOLLOWED
            except (RunError, ConfigError) as raised:
                if self._workers.size == 1:
                    raise
                error = raised  # perhaps since another rank is gone
                self._drop()
                outcome = _end_by(raised)
            delivered = served.delivered > before
            outcomes = self._workers.agree(
                outcome,
                delivered=delivered,
                version=self.version,
                error=error,
                check=check_queue,
            )
            if outcomes.done:
                return
            if outcomes.begins_again:
                self._note_loss(served, delivered=outcomes.delivered)
                if weights is not None:
                    self._catch_up(weights, outcomes.version)
            else:
                self._drop()
                raise outcomes.cause

    def _start_together(self) -> None:
        """Start the process of this rank with those of the others. Where one fails, all raise what
        it has raised.
        """
        error: Exception | None = None
        outcome = CallEnd.DONE
        try:
            self._ready(self._workers.check)
        except AnotherRankEndedError:
            outcome = CallEnd.FOLLOWED
        except Exception as raised:  # an engine raises anything
            error = raised
            outcome = _end_by(raised)
        outcomes = self._workers.agree(outcome, delivered=False, version=self.version, error=error)
        if not outcomes.done:
            self.close()
            raise outcomes.cause

    def _catch_up(self, weights: ArrivingWeights, version: int) -> None:
        """Load the weights that another worker has loaded in flight before a process was lost: they
        had arrived at all workers. RunError where they are not there.
        """
        while self.version < version:
            if not weights.arrived():
                raise RunError(
                    f"another worker of the engine has weights of version {version}, and here are "
                    f"those of {self.version}, without newer ones: expected the same weights on "
                    "all its workers; resume the run"
                )
            weights.load()

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
        try:
            process.command("sleep", weights_follow, check=self._workers.check)
        except (ProcessLostError, AnotherRankEndedError):
            self._drop_lost()
        self._asleep = True

    def leave_groups(self) -> bool:
        """Return whether the engine can go on: not if it is one of several ranks, nor with half
        of its weights.
        """
        if self._workers.size > 1:
            return False
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
        self._wake()
        self._owned.use(weights)
        process = self._owned.process
        if process is None:  # the next one gets them when something is generated
            return
        try:
            self._hand_over(process, weights)
        except (ProcessLostError, AnotherRankEndedError):
            self._drop_lost()

    def _wake(self) -> None:
        """Prepare for a call that wakes the engine."""
        if self._asleep:  # what torch holds here for later is memory of the same device
            accelerator.free_cache(self._device.kind)
        self._asleep = False

    def _ready(self, check: Callable[[], None]) -> EngineProcess:
        """Return a process that has the weights in use; starts one where there is none. ``check``
        is called while it starts: what it raises ends that. ProcessLostError where it is lost,
        AnotherRankEndedError where that of another rank is.
        """
        process = self._owned.process
        if process is None:
            process = self._start(check)
        wanted = self._owned.weights
        if wanted is not None and process.holds is not wanted:
            self._hand_over(process, wanted)
        return process

    def _hand_over(self, process: EngineProcess, weights: WeightsInUse) -> None:
        process.command(
            weights.command,
            weights.value,
            file=weights.file.descriptor,
            check=self._workers.check,
        )
        process.holds = weights

    def _start(self, check: Callable[[], None]) -> EngineProcess:
        """Start a process and build the engine there. RunError where that ends it,
        AnotherRankEndedError where the process of another rank is gone.
        """
        process = EngineProcess(self._device, self._defaults, with_secrets=self._reads_urls)
        meeting = self._workers.next_meeting()
        described = {**self._described, "meeting": None if meeting is None else asdict(meeting)}
        try:
            with self._device.stage("a process for the engine starts"):
                facts = process.command("build", described, check=check)
        except ProcessLostError as error:
            self._workers.note_end()
            raise RunError(
                f"the process of the engine (rollout.process=true) {process.how_it_ended()}\n"
                "It was building the engine: look for what ended it, such as too little memory"
            ) from error
        except BaseException:
            self._workers.note_end()
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

    def _is_running(self) -> bool:
        process = self._owned.process
        if process is None:
            return False
        return process.is_running()

    def _drop(self) -> None:
        """End the process, and keep how it came to its end."""
        process = self._owned.process
        self._owned.process = None
        if process is None:  # it was dropped before, as weights came in flight or it raised
            return
        self._workers.note_end()
        process.end()
        self._end_of_last = process.how_it_ended()

    def _drop_lost(self) -> None:
        """Drop a process that was lost where no response was under way."""
        self._drop()
        logger.warning(
            "the process of the engine %s\nAnother one is started when something is generated",
            self._end_of_last,
        )

    def _note_loss(self, served: ServedRequests, *, delivered: bool) -> None:
        """Drop the process, and have the next one asked again. RunError where it is the second in
        a row without a response that was delivered.
        """
        self._drop()
        again = counted(served.ask_again(), "response")
        if delivered:
            self._lost_in_a_row = 0
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= _FRUITLESS:
            raise RunError(
                f"the process of the engine (rollout.process=true) {self._end_of_last}\n"
                f"{_FRUITLESS} processes in a row have ended so, without a response in between: "
                "remove what ends them, and resume the run"
            )
        logger.warning(
            "the process of the engine %s\nAnother one is started: %s that it had under way will be "
            "generated again",
            self._end_of_last,
            again,
        )

    def _count(self, passes: object) -> None:
        """Add the passes of a call."""
        match passes:
            case [int(tokens), int(number)]:
                before = self._passes if self._passes is not None else RowPasses()
                self._passes = RowPasses(before.tokens + tokens, before.passes + number)


def _end_by(error: Exception) -> CallEnd:
    """Return how a call has ended that raised."""
    if isinstance(error.__cause__, ProcessLostError):
        return CallEnd.NOT_BUILT
    return CallEnd.FAILED


def _by_name(adapters: Mapping[str, Adapter]) -> Iterator[tuple[str, Tensor]]:
    """Yield both halves of each adapter under its own name."""
    for weight, adapter in adapters.items():
        layer = weight.removesuffix(WEIGHT)
        yield layer + A, adapter.a
        yield layer + B, adapter.b
