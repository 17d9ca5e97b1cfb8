"""Generates with servers that are there already: this process has no weights.

A worker replaces the weights of its own servers, and every response says which weights sampled it.
A server that was started again has lost them: it gets them again, and is asked again. No sample
changes by that, since a token depends on its row's seed, its position and the weights.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from torch import Tensor

from siirl_dask.config import ModelConfig, RolloutConfig, Sampler, parse_bytes
from siirl_dask.context import Device, HoldsNoGroups, Rank
from siirl_dask.errors import ConfigError, counted
from siirl_dask.models.weight_files import open_tensors
from siirl_dask.rollout.base_weights import BaseWeights, MergesAdapters
from siirl_dask.rollout.concurrent_requests import serve_concurrently
from siirl_dask.rollout.end_tokens import read_vocabulary
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
from siirl_dask.rollout.server_engine.connection import Server
from siirl_dask.rollout.server_engine.sglang_server import SglangServer
from siirl_dask.rollout.server_engine.vllm_server import VllmServer
from siirl_dask.rollout.server_engine.weight_folder import WeightFolder
from siirl_dask.rollout.server_engine.worker_servers import WorkerServers
from siirl_dask.rollout.weight_loading import Replacement

_T = TypeVar("_T")

_ROOM = "the servers have"
_MORE_ROOM = "start them with room for more (--max-model-len, of SGLang --context-length)"
"""Words of the error for requests that are too long."""


class ServerEngine(MergesAdapters, HoldsNoGroups):
    """A RolloutEngine over servers. ConfigError for a server that does not do what the
    configuration asks; RunError where none is in reach for longer than ``patience``.
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
        self._max_rows = rollout.max_rows
        self._loop = asyncio.new_event_loop()
        servers = [server_at(url, rollout, rollout.max_rows, device.progress) for url in own]
        # these also where nobody calls close()
        self._finish: list[Callable[[], object]] = [
            weakref.finalize(self, _end, self._loop, servers)
        ]
        name = uuid4().hex
        bucket = parse_bytes("rollout.weight_bucket", rollout.weight_bucket)
        self._weights = WeightFolder(shared, bucket, name)
        self._finish.append(weakref.finalize(self, self._weights.close))
        self._servers = WorkerServers(
            servers,
            model,
            engine=name,
            vocabulary=read_vocabulary(model.path),
            forget=self._weights.remove_of,
            progress=device.progress,
        )
        with device.stage(f"the servers at {', '.join(own)} are asked what they are"):
            self.context_length: int | None = self._run(self._servers.examine())
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
            self._servers.close()  # they end a request whose connection is closed
            raise

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter on all servers of this worker.

        ValueError, before anything changes, if the names or shapes do not fit; RunError where a
        server could not load them.
        """
        self._replacement.check()
        weights = self._parameters.as_in_files(self._parameters.fit(tensors, version))
        with self._replacement.to(version):
            self._run(self._servers.check_own())
            folder = self._weights.write(weights, version)
            self.version = version
            self._run(self._servers.load(folder))
            self._weights.keep_only(folder)

    def leave_groups(self) -> bool:
        """Return whether the engine can go on: not with half of its weights, nor as another rank,
        which has other servers.
        """
        return False

    def close(self) -> None:
        """Remove the weights' files; the servers go on. The engine cannot be used any more."""
        for finish in self._finish:
            finish()

    def _load_folder(self, path: str) -> None:
        """Load the weights of the model's folder: a server may have some of an earlier run, whose
        files nobody needs from then on.
        """
        files = open_tensors(path)
        with self._replacement.to(0):
            folder = self._weights.write(
                ((name, file.get_tensor(name)) for name, file in files.items()), 0
            )
            self._run(self._servers.load(folder))

    async def _ask(self, request: GenerationRequest) -> Generation:
        """Return the response of one request, of the weights in use."""
        check_no_images([request])
        check_room(request, self.context_length, _ROOM, _MORE_ROOM)
        return (await self._servers.respond(request, self._end_tokens)).generation

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        async def run() -> _T:
            async with self._servers.looked_for():
                return await coroutine

        return self._loop.run_until_complete(run())


def server_at(
    url: str, rollout: RolloutConfig, connections: int, progress: Callable[[], None]
) -> Server:
    """Return the server at ``url``: one of SGLang where its sampler draws the tokens, else one of
    vLLM. See ``Server``.
    """
    if rollout.sampler is Sampler.sglang:
        return SglangServer(url, rollout.server, connections, progress)
    return VllmServer(url, rollout, connections, progress)


def _end(loop: asyncio.AbstractEventLoop, servers: Sequence[Server]) -> None:
    for server in servers:
        server.close()
    loop.close()
