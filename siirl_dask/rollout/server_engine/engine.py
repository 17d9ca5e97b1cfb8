"""Generates with servers of vLLM that are there already: this process has no weights.

A worker replaces the weights of its own servers, and every response says which weights sampled it.
A server that was started again has lost them: it gets them again, and is asked again. No sample
changes by that, since a token depends on its row's seed, its position and the weights.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig, parse_bytes
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
from siirl_dask.rollout.server_engine.answers import read_answer
from siirl_dask.rollout.server_engine.balance import choose_server
from siirl_dask.rollout.server_engine.connection import EXTENSION, Server, ServerFacts
from siirl_dask.rollout.server_engine.weight_folder import WeightFolder
from siirl_dask.rollout.vllm_engine.other_logprobs import check_engine_length
from siirl_dask.rollout.vllm_engine.row_parameters import logprobs_mode, row_parameters
from siirl_dask.rollout.weight_loading import Replacement

_STARTED_WITH = "default"
"""vLLM's label of the weights that a server started with."""
_MOST_MISTAKEN = 5
"""Answers of other weights than the server says that it has, one after the other. Some are those of a
server that was started again, whose weights another request has brought back."""
_ROOM = "the servers have"
_MORE_ROOM = "start them with a larger --max-model-len"
"""Words of the error for requests that are too long."""


class ServerEngine(MergesAdapters, HoldsNoGroups):
    """A RolloutEngine over servers. ConfigError for a server that does not do what the
    configuration asks; RunError for one that is out of reach for longer than ``patience``.
    """

    processor = None

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, device: Device, rank: Rank
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
        self._mode = logprobs_mode(rollout)
        self._loop = asyncio.new_event_loop()
        self._servers = [
            Server(url, rollout.server, rollout.max_rows, self._progress) for url in own
        ]
        self._extended: dict[str, bool] = {}
        facts = []
        for server in self._servers:
            with device.stage(f"the server at {server.url} is asked what it is"):
                found = self._run(server.examine())
            check_server(server.url, found, model, self._mode)
            self._extended[server.url] = found.has_extension
            facts.append(found)
        self.context_length: int | None = min(found.longest for found in facts)
        bucket = parse_bytes("rollout.weight_bucket", rollout.weight_bucket)
        self._weights = WeightFolder(shared, bucket)
        self._finish = weakref.finalize(  # also where nobody calls close()
            self, _end, self._loop, self._servers, self._weights
        )
        self._name = uuid4().hex
        self._folder = Path()
        self._replacement = Replacement("the server")
        self.version = 0
        with device.stage("servers load the model's weights"):
            self._load_folder(model.path)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
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
        """Name of the weights in use, on servers: no other engine has it."""
        return f"{self._name}-{self.version}"

    def _load_folder(self, path: str) -> None:
        """Load the weights of the model's folder: a server may have some of an earlier run."""
        files = open_tensors(path)
        with self._replacement.to(0):
            self._folder = self._weights.write(
                ((name, file.get_tensor(name)) for name, file in files.items()), 0
            )
            self._load_everywhere()

    def _load_everywhere(self) -> None:
        async def load() -> None:
            await asyncio.gather(*[self._load(server) for server in self._servers])

        self._run(load())

    async def _load(self, server: Server) -> None:
        folder = str(self._folder)
        if self._extended[server.url]:
            await server.load("load_siirl_weights", {"folder": folder}, self._label)
        else:
            await server.load("reload_weights", {"weights_path": folder}, self._label)
        self._progress()

    async def _ask(self, request: GenerationRequest) -> Generation:
        """Return the response of one request, of the weights in use."""
        check_no_images([request])
        check_room(request, self.context_length, _ROOM, _MORE_ROOM)
        body = {
            "token_ids": list(request.prompt),
            "sampling_params": row_parameters(
                request.seed, request.sampling, self._end_tokens, request.begun, self._mode
            ),
        }
        under_way = [server.under_way for server in self._servers]
        server = self._servers[choose_server(request.prompt, under_way)]
        mistaken = 0
        while True:
            found = await server.generate(body)
            answer = read_answer(found, request, self._end_tokens, self._mode, server.url)
            if answer.labels == {self._label}:
                self._progress()
                return answer.generation
            mistaken = 0 if await self._restored(server) else mistaken + 1
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
            label = await server.label()
            if label == self._label:
                return False
            if label != _STARTED_WITH:
                raise RunError(
                    f"{server.url}: somebody else has replaced its weights: they are {label!r}, and "
                    f"expected were {self._label!r}; a server is for one run, and one engine of it"
                )
            await self._load(server)
            return True

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)


def check_server(url: str, found: ServerFacts, model: ModelConfig, mode: str) -> None:
    """Raise ConfigError for a server whose samples would be others than the configuration's."""
    if found.logprobs_mode != mode:
        raise ConfigError(
            f"{url}: its --logprobs-mode is {found.logprobs_mode}, and {mode} is what "
            "rollout.sampler and rollout.temperature need; start it by python -m "
            f"siirl_dask.rollout.server_engine.serve MODEL, or with --logprobs-mode {mode} and "
            "rollout.sampler=vllm"
        )
    if found.generation_config != "vllm":
        raise ConfigError(
            f"{url}: its --generation-config is {found.generation_config}, by which samples follow "
            "settings of the model's folder; start it with --generation-config vllm"
        )
    if model.dtype is not Dtype.auto and found.dtype != model.dtype:
        raise ConfigError(
            f"{url}: it computes in {found.dtype}, and model.dtype is {model.dtype}; start it with "
            f"--dtype {model.dtype}, or give model.dtype={found.dtype}"
        )
    cure = f"start it with --max-model-len {model.longest_row}"
    check_engine_length(model, found.longest, f"{url}: --max-model-len", cure)
    if found.on_cpu and not found.has_extension:
        raise ConfigError(
            f"{url}: on a CPU vLLM leaves some weights as they were, without a word; start it with "
            f"--worker-extension-cls {EXTENSION}, or by python -m siirl_dask.rollout.server_engine.serve"
        )


def _end(loop: asyncio.AbstractEventLoop, servers: Sequence[Server], weights: WeightFolder) -> None:
    for server in servers:
        server.close()
    loop.close()
    weights.close()
