"""Generates with servers that are there already: this process has no weights.

A worker replaces the weights of its own servers, and every response says which weights sampled it.
A server that was started again has lost them: it gets them again, and is asked again. No sample
changes by that, since a token depends on its row's seed, its position and the weights.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from siirl_dask.config import ModelConfig, RolloutConfig, Sampler, parse_bytes
from siirl_dask.context import Device, HoldsNoGroups, Rank
from siirl_dask.errors import ConfigError, RunError, counted
from siirl_dask.models.weight_files import open_tensors
from siirl_dask.rollout.base_weights import BaseWeights, MergesAdapters
from siirl_dask.rollout.concurrent_requests import serve_concurrently
from siirl_dask.rollout.engine import (
    Generation,
    GenerationRequest,
    RequestQueue,
    Sampling,
    Tokenizer,
    check_no_images,
    serve_all,
)
from siirl_dask.rollout.model_folder import read_model_folder
from siirl_dask.rollout.request_room import check_room
from siirl_dask.rollout.server_engine.balance import choose_server
from siirl_dask.rollout.server_engine.connection import LOADING, Server
from siirl_dask.rollout.server_engine.sglang_server import SglangServer
from siirl_dask.rollout.server_engine.vllm_server import VllmServer
from siirl_dask.rollout.server_engine.weight_folder import WeightFolder
from siirl_dask.rollout.weight_loading import Replacement

_STARTED_WITH = "default"
"""Label of the weights that a server of vLLM or SGLang started with."""
_MOST_MISTAKEN = 5
"""Answers of other weights than the server says that it has, one after the other. Some are those of a
server that was started again, whose weights another request has brought back."""
_ROOM = "the servers have"
_MORE_ROOM = "start them with room for more (--max-model-len, of SGLang --context-length)"
"""Words of the error for requests that are too long."""


class ServerEngine(MergesAdapters, HoldsNoGroups):
    """A RolloutEngine over servers. ConfigError for a server that does not do what the
    configuration asks; RunError for one that is out of reach for longer than ``patience``.
    """

    processor = None

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        device: Device,
        rank: Rank,
    ) -> None:
        """``rank`` is the worker's among those of the role: its servers are ``urls[rank::size]``."""
        folder = read_model_folder(model)
        own = rollout.server.urls[rank.rank :: rank.size]
        shared = rollout.server.weights_folder
        if not own or shared is None:
            raise ConfigError(
                f"rollout.server: urls={rollout.server.urls} and weights_folder={shared!r}, and "
                f"{counted(rank.size, 'worker')} generate: expected a server for each, and a folder"
            )
        self.tokenizer: Tokenizer = folder.tokenizer
        self._parameters = folder.parameters
        self._end_tokens = folder.end_tokens
        self._base = BaseWeights(model.path, self._parameters)
        self._progress = device.progress
        self._max_rows = rollout.max_rows
        self._loop = asyncio.new_event_loop()
        self._servers = [server_at(url, rollout, rollout.max_rows, self._progress) for url in own]
        facts = []
        for server in self._servers:
            with device.stage(f"the server at {server.url} is asked what it is"):
                facts.append(self._run(server.examine()))
            server.check(model)
        self.context_length: int | None = min(found.longest for found in facts)
        self._name = uuid4().hex
        bucket = parse_bytes("rollout.weight_bucket", rollout.weight_bucket)
        self._weights = WeightFolder(shared, bucket, self._name)
        self._finish = weakref.finalize(  # also where nobody calls close()
            self, _end, self._loop, self._servers, self._weights
        )
        self._folder = Path()
        self._replacement = Replacement("the server")
        self.version = 0
        with device.stage("servers load the model's weights"):
            self._load_folder(model.path)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Generation]:
        """Return one response per prompt, in order.

        ValueError for a prompt without tokens, ConfigError for one that leaves no room for
        ``max_tokens``, and for sampling whose log-probs the servers do not report.
        """
        return serve_all(self, prompts, seeds, sampling)

    def serve(self, queue: RequestQueue) -> None:
        """Generate until the queue is empty. A row that is done makes room for the next at once."""
        self._replacement.check()
        try:
            self._run(serve_concurrently(queue, self._max_rows, self._ask))
        except BaseException:
            for server in self._servers:  # which end a request whose connection is closed
                server.close()
            raise

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter on all servers of this worker.

        ValueError, before anything changes, if the names or shapes do not fit; RunError where a
        server could not load them.
        """
        self._replacement.check()
        weights = self._parameters.as_in_files(self._parameters.fit(tensors, version))
        with self._replacement.to(version):
            self._run(self._check_own())
            self._folder = self._weights.write(weights, version)
            self.version = version
            self._load_everywhere()
            self._weights.keep_only(self._folder)

    def leave_groups(self) -> bool:
        """Return whether the engine can go on: not with half of its weights, nor as another rank,
        which has other servers.
        """
        return False

    def close(self) -> None:
        """Remove the weights' files; the servers go on. The engine cannot be used any more."""
        self._finish()

    @property
    def _label(self) -> str:
        """Name of the weights in use, on servers: no other engine has it, and no others of the same
        version, as two agents' adapters may be.
        """
        return f"{self._name}-{self._folder.name}"

    def _load_folder(self, path: str) -> None:
        """Load the weights of the model's folder: a server may have some of an earlier run, whose
        files nobody needs from then on.
        """
        files = open_tensors(path)
        with self._replacement.to(0):
            before = [self._run(server.label()) for server in self._servers]
            self._folder = self._weights.write(
                ((name, file.get_tensor(name)) for name, file in files.items()), 0
            )
            self._load_everywhere()
            for label in before:
                self._weights.remove_of(engine_of(label))

    async def _check_own(self) -> None:
        """Raise RunError where somebody else has replaced a server's weights."""
        for server in self._servers:
            self._is_lacking(server, await server.label())

    def _load_everywhere(self) -> None:
        """Have all servers load. Where one cannot, the others end what they have begun: a server
        that nobody attends to any more would stay paused.
        """

        async def load() -> None:
            loads = [asyncio.ensure_future(self._load(server)) for server in self._servers]
            try:
                await asyncio.wait(loads, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for one in loads:
                    one.cancel()
                await asyncio.wait(loads)
            failures = [one.exception() for one in loads if not one.cancelled()]
            for failure in failures:
                if failure is not None:
                    raise failure

        self._run(load())

    async def _load(self, server: Server) -> None:
        await server.load(self._folder, self._label)
        self._progress()

    async def _ask(self, request: GenerationRequest) -> Generation:
        """Return the response of one request, of the weights in use."""
        check_no_images([request])
        check_room(request, self.context_length, _ROOM, _MORE_ROOM)
        under_way = [server.under_way for server in self._servers]
        server = self._servers[choose_server(request.prompt, under_way)]
        mistaken = 0
        while True:
            answer = await server.respond(request, self._end_tokens)
            if answer.labels == {self._label}:
                self._progress()
                return answer.generation
            mistaken += 1
            if await self._restored(server):
                mistaken = 0
            if mistaken == _MOST_MISTAKEN:
                raise RunError(
                    f"{server.url}: it says that its weights are {self._label!r}, and its answers "
                    f"that they were sampled by {sorted(answer.labels)}: expected one server there, "
                    "and no proxy that has several"
                )

    async def _restored(self, server: Server) -> bool:
        """Give a server that was started again the weights in use; return whether it lacked them.
        RunError where others have replaced them.
        """
        async with server.restoring:
            if not self._is_lacking(server, await server.label()):
                return False
            await self._load(server)
            return True

    def _is_lacking(self, server: Server, label: str) -> bool:
        """Return whether a server, whose weights have ``label``, was started again and lacks those
        in use. RunError where others have replaced them.
        """
        if label == self._label:
            return False
        if label != _STARTED_WITH:
            raise RunError(
                f"{server.url}: somebody else has replaced its weights: they are {label!r}, and "
                f"expected were {self._label!r}; a server is for one run, and one engine of it"
            )
        return True

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)


def engine_of(label: str) -> str:
    """Return the name of the engine that a server had its weights from, by their label, or while it
    loads them; any text where no engine's.
    """
    return label.removeprefix(LOADING).partition("-")[0]


def server_at(
    url: str, rollout: RolloutConfig, connections: int, progress: Callable[[], None]
) -> Server:
    """Return the server at ``url``: one of SGLang where its sampler draws the tokens, else one of
    vLLM. See ``Server``.
    """
    if rollout.sampler is Sampler.sglang:
        return SglangServer(url, rollout.server, connections, progress)
    return VllmServer(url, rollout, connections, progress)


def _end(loop: asyncio.AbstractEventLoop, servers: Sequence[Server], weights: WeightFolder) -> None:
    for server in servers:
        server.close()
    loop.close()
    weights.close()
