"""The process of an engine: builds it, and carries out the commands of the worker that has started
the process.

    python -m siirl_dask.rollout.process_engine.child SOCKET FOLDER

Nothing but ``EngineProcess`` calls it. An engine asks its queue for requests; here each question goes
to the worker, so an engine does here what it does in a worker, in the same order.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from siirl_dask.context import Rank, Sleeps
from siirl_dask.devices import accelerator
from siirl_dask.errors import PeerError, RunError
from siirl_dask.models.broken_imports import hide
from siirl_dask.rollout.engine import (
    DraftsTokens,
    Generation,
    GenerationRequest,
    LoadsInFlight,
    RolloutEngine,
    TakesAdapters,
    WeightStream,
)
from siirl_dask.rollout.process_engine.described_inputs import (
    DescribedInputs,
    Reports,
    read_described,
)
from siirl_dask.rollout.process_engine.errors_as_data import describe_error
from siirl_dask.rollout.process_engine.frames import (
    ABORT,
    ANSWER,
    DONE,
    FAILED,
    Frame,
    MessageSocket,
    ProcessLostError,
)
from siirl_dask.rollout.process_engine.lifeline import end_with_parent
from siirl_dask.rollout.requests import RequestMessage, Sampled, pack_sampled
from siirl_dask.rollout.specs import engine_spec

if TYPE_CHECKING:
    from siirl_dask.rollout.process_engine.nameless_file import TensorEntry

_EVERY = 0.1
"""Seconds between two reports of progress, at least."""


class _GivenUpError(Exception):
    """The worker has given up what it has asked for."""


class WorkersQueue:
    """The queue of the worker, which is asked over the socket: a RequestQueue."""

    def __init__(self, messages: MessageSocket, engine: RolloutEngine) -> None:
        self._messages = messages
        self._engine = engine

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[int, GenerationRequest]]:
        """Return up to ``limit`` requests of the worker's queue, with their numbers."""
        found = ask(self._messages, "next", [limit, wait])
        message = RequestMessage(self._engine.version)
        requests = []
        for one in _listed(found):
            match one:
                case [int(number), request]:
                    requests.append((number, message.read(request)))
                case _:
                    raise PeerError(f"received {one!r:.200}, which is no numbered request")
        return requests

    def ended(self) -> bool:
        """Return whether no more requests will come."""
        return bool(ask(self._messages, "ended"))

    def complete(self, ticket: Any, result: Generation) -> None:
        """Give the worker the result of a request."""
        self._messages.send("complete", [ticket, pack_sampled(Sampled(result, ""))])


class WorkersWeights:
    """New weights that may arrive at the worker: ArrivingWeights."""

    def __init__(self, messages: MessageSocket, carry_out: Callable[[Frame], None]) -> None:
        """``carry_out`` loads weights, as a command of the worker's."""
        self._messages = messages
        self._carry_out = carry_out

    def arrived(self) -> bool:
        """Return whether weights are there that are not loaded yet."""
        return bool(ask(self._messages, "arrived"))

    def load(self) -> None:
        """Have the worker load them: it sends commands for that before it answers."""
        self._messages.send("load")
        while (message := self._messages.receive()).name not in (ANSWER, ABORT):
            self._carry_out(message)
        if message.name == ABORT:
            raise _GivenUpError


def ask(messages: MessageSocket, name: str, value: Any = None) -> Any:
    """Return the worker's answer to a question."""
    messages.send(name, value)
    message = messages.receive()
    if message.name == ABORT:
        raise _GivenUpError
    if message.name != ANSWER:
        raise PeerError(f"received {message.name!r}: expected an answer to {name!r}")
    return message.value


class EngineCommands:
    """Carries out the commands of a worker, the first of which builds the engine."""

    def __init__(self, messages: MessageSocket) -> None:
        self._messages = messages
        self._reported = 0.0
        self._built: RolloutEngine | None = None

    def run(self) -> None:
        """Carry out commands until the worker is gone."""
        with suppress(ProcessLostError):
            while True:
                self.carry_out(self._messages.receive())

    def carry_out(self, message: Frame) -> None:
        """Carry out one command, and send its result or what it raised."""
        try:
            result = self._result(message)
        except ProcessLostError:
            raise
        except _GivenUpError:  # no bug of the engine's: the worker knows why
            self._messages.send(FAILED, [_GivenUpError.__name__, ""])
        except Exception as error:  # an engine raises anything
            self._messages.send(FAILED, describe_error(error))
        else:
            self._messages.send(DONE, result)
        finally:
            if message.file is not None:
                os.close(message.file)

    @property
    def _engine(self) -> RolloutEngine:
        if self._built is None:
            raise PeerError("received a command for an engine that is not built")
        return self._built

    def _result(self, message: Frame) -> Any:
        match message.name, message.value:
            case "build", described:
                return self._build(described)
            case "serve", bool(in_flight):
                return self._serve(in_flight=in_flight)
            case "load weights", [int(version), entries] if message.file is not None:
                return self._load_weights(message.file, entries, version)
            case "use adapters", [str(agent), float(scaling), int(version), entries] if (
                message.file is not None
            ):
                tensors = self._tensors(message.file, entries)
                return self._use_adapters(agent, scaling, version, tensors)
            case "sleep", bool(weights_follow):
                if isinstance(self._engine, Sleeps):
                    self._engine.sleep(weights_follow=weights_follow)
                return None
        raise PeerError(f"received {message.name!r} with {message.value!r:.200}: no such command")

    def _build(self, value: object) -> dict[str, Any]:
        """Build the engine, and return what the worker has to know of it."""
        import torch  # takes seconds

        described = read_described(value)
        logging.getLogger("siirl_dask").setLevel(described.log_level)
        torch.set_num_threads(described.threads)
        accelerator.bind(described.device.kind, described.device.index)
        hide()
        reports = Reports(
            progress=self._progress,
            stage=self._stage,
            waiting=self._waiting,
            engine_cache=self._cache,
        )
        inputs = described.inputs(_rank_of(described), reports)
        self._built = engine_spec(described.engine).build(inputs)
        return {"context_length": self._built.context_length}

    def _serve(self, *, in_flight: bool) -> list[int] | None:
        """Serve the worker's queue; returns tokens and passes of drafts, where the engine has some."""
        engine = self._engine
        queue = WorkersQueue(self._messages, engine)
        if not in_flight:
            engine.serve(queue)
        elif isinstance(engine, LoadsInFlight):
            engine.serve_in_flight(queue, WorkersWeights(self._messages, self.carry_out))
        else:
            raise RunError("the engine takes no new weights while it generates")
        passes = engine.take_passes() if isinstance(engine, DraftsTokens) else None
        return None if passes is None else [passes.tokens, passes.passes]

    def _load_weights(self, file: int, entries: object, version: int) -> None:
        from siirl_dask.rollout.process_engine.nameless_file import read_entries, read_tensors

        listed = read_entries(entries)
        shapes = {entry.name: entry.shape for entry in listed}
        self._engine.load_weights(WeightStream(shapes, read_tensors(file, listed)), version)

    def _use_adapters(
        self,
        agent: str,
        scaling: float,
        version: int,
        tensors: Mapping[str, Any],
    ) -> None:
        from siirl_dask.rollout.base_weights import Adapters
        from siirl_dask.rollout.engine import FitsAdapters

        engine = self._engine
        if isinstance(engine, FitsAdapters):
            fitted = Adapters({}, scaling, version)
            if tensors:
                fitted = engine.fit_adapters(tensors.items(), scaling, version)
            engine.use_adapters(fitted, agent)
        elif isinstance(engine, TakesAdapters):
            engine.load_adapters(tensors.items(), scaling, version)
        else:
            raise RunError("the engine takes whole weights alone")

    def _tensors(self, file: int, value: object) -> dict[str, Any]:
        from siirl_dask.rollout.process_engine.nameless_file import read_entries, read_tensors

        listed: list[TensorEntry] = read_entries(value)
        return dict(read_tensors(file, listed))

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._reported > _EVERY:
            self._reported = now
            self._messages.send("progress")

    def _cache(self, used: float, waiting: int) -> None:
        self._messages.send("cache", [float(used), waiting])

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._messages.send("stage", name)
        try:
            yield
        finally:
            self._messages.send("stage ended")

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._messages.send("waiting")
        try:
            yield
        finally:
            self._messages.send("stage ended")


def _rank_of(described: DescribedInputs) -> Rank:
    """Return the rank of the engine that is built: of one that has several, in a group of them."""
    if described.meeting is None:
        return Rank(described.rank, described.ranks)
    # imports torch
    from siirl_dask.rollout.process_engine.ranks import join

    return join(described.meeting)


def _listed(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise PeerError(f"received {value!r:.200}: expected a list of requests")
    return value


def main() -> None:
    descriptor = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle
    end_with_parent(sys.argv[2], descriptor)
    logging.basicConfig(level=logging.WARNING)
    EngineCommands(MessageSocket(socket.socket(fileno=descriptor))).run()
    # threads and atexit functions of libraries have nothing to save
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
