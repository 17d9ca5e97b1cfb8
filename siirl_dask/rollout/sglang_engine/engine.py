"""Generates with SGLang, in processes that it starts beside this one: written against its Engine
of release 0.5.23.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, groupby
from typing import Any

from torch import Tensor

from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.context import Device, DeviceKind, HoldsNoGroups
from siirl_dask.devices import accelerator
from siirl_dask.errors import ConfigError, RunError, clause
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
from siirl_dask.rollout.sglang_engine.process import Ending, as_parent, load_sglang
from siirl_dask.rollout.sglang_engine.requests import read_generation, sampling_params
from siirl_dask.rollout.sglang_engine.settings import given_options, server_arguments
from siirl_dask.rollout.sglang_engine.sleeping import SglangSleep
from siirl_dask.rollout.specs import alternatives
from siirl_dask.rollout.weight_loading import Replacement

_LAYER = re.compile(r".*?\.\d+\.")
_ROOM = "SGLang has"
_MORE_ROOM = "give more rollout.sglang.mem_fraction_static if the model can take more"
"""Words of the error for requests that are too long."""


class SglangEngine(MergesAdapters, HoldsNoGroups):
    """A RolloutEngine over ``sglang.Engine``. ConfigError when SGLang cannot run the model in
    ``model.path``.
    """

    processor = None

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, device: Device) -> None:
        folder = read_model_folder(model)
        if folder.sees_images:
            raise ConfigError(
                f"model.path={model.path!r}: a model that sees images, which rollout.engine=sglang "
                f"does not take here; take {alternatives('sglang', lambda able: able.images)}"
            )
        self.tokenizer: Tokenizer = folder.tokenizer
        self._parameters = folder.parameters
        self._end_tokens = folder.end_tokens
        self._base = BaseWeights(model.path, self._parameters)
        self._progress = device.progress
        self._max_rows = rollout.max_rows
        with device.stage("SGLang loads the weights"):
            self._engine, ending = _start(model, rollout, device)
        self._finish = weakref.finalize(self, ending)  # also where nobody calls close()
        self.context_length: int | None = int(self._engine.get_server_info()["max_req_input_len"])
        self._sleep = SglangSleep(
            self._engine,
            partial(accelerator.free_cache, device.kind),
            able=rollout.sglang.sleep and device.kind is not DeviceKind.CPU,
        )
        self._numbers = count()
        self._replacement = Replacement("SGLang")
        self.version = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Generation]:
        """Return one response per prompt, in order.

        ValueError for a prompt without tokens, ConfigError for one that leaves no room for
        ``max_tokens``, and for sampling that SGLang cannot do.
        """
        return serve_all(self, prompts, seeds, sampling)

    def serve(self, queue: RequestQueue) -> None:
        """Generate until the queue is empty. A row that is done makes room for the next at once."""
        self._replacement.check()
        self._sleep.end()
        self._engine.loop.run_until_complete(
            serve_concurrently(queue, self._max_rows, self._generate, self._abort)
        )

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter, a layer at a time, and forget what was read of prompts.

        ValueError, before anything changes, if the names or shapes do not fit; RunError when SGLang
        fails half way.
        """
        self._replacement.check()
        weights = self._parameters.fit(tensors, version)
        self._sleep.wake_weights()
        with self._replacement.to(version):
            self._replace(weights)
        self.version = version

    def sleep(self, *, weights_follow: bool = False) -> None:
        """Free the cache, and the weights if others follow. Does nothing on a CPU, nor with
        ``rollout.sglang.sleep=false``.
        """
        self._sleep.begin(weights_follow=weights_follow)

    def leave_groups(self) -> bool:
        """Return whether the engine can go on: not with half of its weights."""
        return not self._replacement.broken

    def close(self) -> None:
        """End SGLang's processes; the engine cannot be used any more."""
        self._finish()

    async def _generate(self, request: GenerationRequest) -> Generation:
        """Return the response of one request, and report progress as it grows."""
        check_no_images([request])
        check_room(request, self.context_length, _ROOM, _MORE_ROOM)
        params = sampling_params(request, self._end_tokens)
        reports = await self._engine.async_generate(
            input_ids=list(request.prompt),
            sampling_params=params,
            return_logprob=True,
            stream=True,
            rid=str(next(self._numbers)),
        )
        whole: Mapping[str, Any] = {}
        async for report in reports:  # each has all tokens so far
            whole = report
            self._progress()
        return read_generation(whole, request, self.version)

    def _abort(self) -> None:
        """End what is under way, after an error: SGLang does nothing else before it is idle."""
        self._engine.tokenizer_manager.abort_request(abort_all=True)

    def _replace(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Hand SGLang all weights, and have it forget what others have made."""
        self._demand(self._engine.begin_weight_update())
        for layer in _by_layer(self._parameters.as_in_files(weights)):
            self._demand(
                self._engine.update_weights_from_tensor(named_tensors=layer, flush_cache=False)
            )
            self._progress()
        self._demand(self._engine.end_weight_update())
        if not self._sleep.cache_is_gone:
            flushed = self._engine.flush_cache()
            self._demand((flushed.success, flushed.message))

    def _demand(self, answer: tuple[bool, str]) -> None:
        success, message = answer
        if not success:
            raise RunError(f"SGLang could not load weights: {message}")


def _by_layer(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights of one layer after the other; those outside of layers each alone."""

    def layer(weight: tuple[str, Tensor]) -> str:
        found = _LAYER.match(weight[0])
        if found:
            return found.group()
        return weight[0]

    for _, group in groupby(weights, layer):
        # SGLang's pickle moves a tensor of the host into shared memory, and the sender's must stay
        # where it is.
        yield [
            (name, tensor.detach().clone() if tensor.is_cpu else tensor.detach())
            for name, tensor in group
        ]


def _start(model: ModelConfig, rollout: RolloutConfig, device: Device) -> tuple[Any, Ending]:
    """Build SGLang's engine, and what ends it. ConfigError, naming the options, when it cannot
    run.
    """
    module, arguments = load_sglang()
    settings = server_arguments(
        model, rollout, device, arguments.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    )
    try:
        with as_parent():
            engine = module.Engine(**settings)
    except Exception as error:  # SGLang raises anything from TypeError to RuntimeError
        raise ConfigError(
            f"model.path={model.path!r}: SGLang cannot run it with {given_options(rollout)}: "
            f"{clause(error)}; change what does not fit or take another rollout.engine"
        ) from error
    return engine, Ending(engine, module)
