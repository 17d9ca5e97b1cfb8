"""Generates with vLLM inside this process: rows of any length at once, each prompt read once for
all samples.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from siirl_dask.config import LoraConfig, ModelConfig, RolloutConfig
from siirl_dask.context import ArrivingWeights, Device, DeviceKind, HoldsNoGroups, Rank
from siirl_dask.devices import traits_of
from siirl_dask.errors import ConfigError, PeerError, RunError, is_of_collective
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.models.routing import needed_routing
from siirl_dask.rollout.base_weights import Adapters, BaseWeights, MergesAdapters
from siirl_dask.rollout.engine import (
    FinishReason,
    Generation,
    GenerationRequest,
    RequestQueue,
    Sampling,
    Tokenizer,
    serve_all,
)
from siirl_dask.rollout.model_folder import read_model_folder
from siirl_dask.rollout.request_room import check_room
from siirl_dask.rollout.vllm_engine import process as vllm_process
from siirl_dask.rollout.vllm_engine.other_logprobs import check_logprobs_of_vllm
from siirl_dask.rollout.vllm_engine.process_groups import (
    EngineRanks,
    EngineWorld,
    without_queues,
)
from siirl_dask.rollout.vllm_engine.tensor_parallel import (
    TensorParallelQueue,
    TensorParallelWeights,
)
from siirl_dask.rollout.weight_loading import Replacement

vllm_process.prepare()

from vllm import LLM, RequestOutput, TokensPrompt  # noqa: E402  # not before it is prepared for
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.distributed.parallel_state import (  # noqa: E402
    model_parallel_is_initialized,
)

from siirl_dask.rollout.vllm_engine.adapter_layers import Slots  # noqa: E402
from siirl_dask.rollout.vllm_engine.image_prompts import check_read, image_arguments, prompt_of  # noqa: E402
from siirl_dask.rollout.vllm_engine.mends import (  # noqa: E402
    SeparateClasses,
    free_while_asleep,
    rotary_places,
    rotate_heads_on_cpus,
)
from siirl_dask.rollout.vllm_engine.releases import cache_usage, reload_weights, use_logprobs_mode  # noqa: E402
from siirl_dask.rollout.vllm_engine.reloading import (  # noqa: E402
    NewWeights,
    forget_prefixes,
    layers_with_weights,
    nothing_left_out,
    pack_for_cpu,
    preempt_all,
)
from siirl_dask.rollout.vllm_engine.routes import VllmRoutes  # noqa: E402
from siirl_dask.rollout.vllm_engine.row_parameters import logprobs_mode  # noqa: E402
from siirl_dask.rollout.vllm_engine.settings import given_options, llm_arguments  # noqa: E402
from siirl_dask.rollout.vllm_engine.sleeping import FREES_WEIGHTS, KEEPS_WEIGHTS, VllmSleep  # noqa: E402
from siirl_dask.rollout.vllm_engine.token_choice import request_params, token_logprobs  # noqa: E402

logger = logging.getLogger("siirl_dask.rollout")

_OPEN: weakref.WeakSet[VllmEngine] = weakref.WeakSet()
"""Engines that have begun to start and were not closed."""
_ROOM = "vLLM has"
_MORE_ROOM = "give more rollout.vllm.kv_cache_memory if the model can take more"
"""Words of the error for requests that are too long."""


@dataclass(slots=True)
class _Running:
    """A request that vLLM works on."""

    ticket: Any
    request: GenerationRequest
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token, up to the latest change of weights."""

    def versions_of(self, tokens: int, version: int) -> list[int]:
        """Return the version of each of ``tokens`` tokens, the latest of which ``version`` has
        sampled.
        """
        return self.versions + [version] * (tokens - len(self.versions))


class VllmEngine(MergesAdapters, HoldsNoGroups):
    """A RolloutEngine over ``vllm.LLM``. ConfigError when vLLM cannot run the model in
    ``model.path``.

    With ``rollout.tensor_parallel_size`` it is one rank of an engine: all ranks must call each
    method alike, each with a queue of its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        device: Device,
        rank: Rank = Rank(),  # noqa: B008  # frozen
        lora: LoraConfig | None = None,
        processor: ImageProcessor | None = None,
        agents: Sequence[str] = (),
    ) -> None:
        """``lora`` describes the adapters that ``load_adapters`` will get, or each of ``agents``;
        None: none. Without a ``processor`` requests with images are refused.
        """
        check_logprobs_of_vllm(model.path, 0, device.kind)
        folder = read_model_folder(model)
        self._ranks = EngineRanks(rank, rollout.tensor_parallel_size)
        self._ranks.check_devices(device)
        self.processor = processor
        of_images = image_arguments(processor) if folder.has_image_part else None
        settings = llm_arguments(
            model,
            rollout,
            device=device,
            ranks=self._ranks,
            lora=lora,
            images=of_images,
            agents=len(agents) or 1,
        )
        self._parameters = folder.parameters
        self._end_tokens = folder.end_tokens
        self._base = BaseWeights(model.path, self._parameters)
        self.tokenizer: Tokenizer = folder.tokenizer
        self._world = EngineWorld()
        self._on_cpu = device.kind is DeviceKind.CPU
        if self._on_cpu:
            rotate_heads_on_cpus()
        else:
            free_while_asleep()
        self._progress = device.progress
        self._waiting = device.waiting
        self._note_cache = device.engine_cache
        with vllm_process.named_stages(device.stage):
            self._llm = self._start(model, settings, given_options(rollout, device), device.kind)
        # also where nobody calls close()
        self._finish = weakref.finalize(self, _shut_down, self._llm, self._world, self._on_cpu)
        self.routing = needed_routing(model.path) if rollout.router_replay else None
        self._routes = None if self.routing is None else VllmRoutes(self._llm, self.routing)
        places = self._llm.apply_model(rotary_places)[0]
        length = int(self._llm.llm_engine.model_config.max_model_len)
        self.context_length: int | None = length if places is None else min(length, places)
        self._max_rows: int = settings["max_num_seqs"]
        self._numbers = count()
        self._logprobs_mode = logprobs_mode(rollout)
        self._has_layers = bool(settings.get("enable_lora"))
        if lora is not None and lora.rank:
            own = "computes with adapters in layers of its own"
            logger.info(
                "vLLM %s", own if self._has_layers else "gets weights with the adapters merged in"
            )
        level = min(rollout.vllm.sleep_level, KEEPS_WEIGHTS if self._has_layers else FREES_WEIGHTS)
        self._sleep = VllmSleep(self._llm, 0 if self._on_cpu else level, device)
        self._slots = Slots(agents)
        self._replacement = Replacement("vLLM")
        self.version = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Generation]:
        """Return one response per prompt, in order.

        ValueError for a prompt without tokens, ConfigError for one that leaves no room for
        ``max_tokens``.
        """
        return serve_all(self, prompts, seeds, sampling)

    def serve(self, queue: RequestQueue) -> None:
        """Generate until the queue is empty. A row that is done makes room for the next at once."""
        self._serve(queue, None)

    def serve_in_flight(self, queue: RequestQueue, weights: ArrivingWeights) -> None:
        """Generate until the queue is empty, and load weights that arrive between two steps: rows
        under way are preempted, and vLLM computes their keys and values again. Ranks load once
        weights have arrived at all of them.
        """
        self._serve(queue, weights)

    def _serve(self, queue: RequestQueue, weights: ArrivingWeights | None) -> None:
        self._sleep.end()
        if self._ranks.size > 1:
            shared = TensorParallelQueue(
                queue,
                self._ranks.gather,
                rank=self._ranks.rank,
                size=self._ranks.size,
                version=self.version,
                waiting=self._waiting,
            )
            queue = shared
            if weights is not None:
                weights = TensorParallelWeights(weights, shared.gather, lambda: self.version)
        engine = self._llm.llm_engine
        running: dict[str, _Running] = {}
        try:
            with self._eager():
                while self._admit(queue, running):
                    self._progress()
                    while weights is not None and weights.arrived():
                        self._change_weights(weights, running)
                    for output in engine.step():
                        if output.finished:
                            row = running.pop(output.request_id)
                            check_read(output, row.request.prompt)
                            generation = self._generation(output, len(row.request.prompt))
                            if weights is not None:
                                versions = row.versions_of(len(generation.token_ids), self.version)
                                generation = replace(generation, versions=versions)
                            queue.complete(row.ticket, generation)
                    self._tell_cache()
        finally:
            if running:
                engine.abort_request(list(running))

    def _change_weights(self, weights: ArrivingWeights, running: Mapping[str, _Running]) -> None:
        """Load weights between two steps. The tokens that rows have by now are the older ones'."""
        engine = self._llm.llm_engine
        for state in engine.output_processor.request_states.values():
            row = running[state.external_req_id]
            row.versions = row.versions_of(state.detokenizer.num_output_tokens(), self.version)
        preempt_all(engine)
        weights.load()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter and reset the prefix cache.

        ValueError, before anything changes, if the names or shapes do not fit; RunError when vLLM
        fails half way.
        """
        self._replacement.check()
        weights = NewWeights(self._parameters.as_in_files(self._parameters.fit(tensors, version)))
        self._sleep.wake_weights()
        with self._replacement.to(version):
            with self._eager(), vllm_process.untouched():
                with nothing_left_out(self._layers_with_weights):
                    self._llm.collective_rpc(
                        reload_weights, kwargs={"weights_iterator": iter(weights)}
                    )
                self._llm.apply_model(weights.copy_sinks)
                if self._on_cpu:
                    self._llm.apply_model(pack_for_cpu)
            self._forget_prompts()
            self._sleep.loaded()
        self._slots.chosen = None
        self.version = version

    def use_adapters(self, given: Adapters, agent: str = "") -> None:
        """Compute with ``given``, those of ``agent``, from now on, in vLLM's own layers where it
        has them; errors as ``load_weights``.
        """
        if not self._has_layers:
            super().use_adapters(given, agent)
            return
        if not self._slots.has(agent, given):
            self._sleep.wake_weights()
            self._slots.put(self._llm, agent, given)
            self._forget_prompts()
        self._slots.choose(agent, given)
        self.version = given.version

    def _layers_with_weights(self) -> set[str]:
        found: set[str] = self._llm.apply_model(layers_with_weights)[0]
        return found

    def _forget_prompts(self) -> None:
        """Forget what other weights have made of prompts and of images."""
        forget_prefixes(self._llm)
        if self.processor is not None:
            self._llm.llm_engine.reset_encoder_cache()

    def sleep(self, *, weights_follow: bool = False) -> None:
        """Free the KV cache, and move the weights to the host, or free them if others follow: as
        ``rollout.vllm.sleep_level`` says. Does nothing on a CPU, where all memory is the host's.
        """
        self._sleep.begin(weights_follow=weights_follow)

    def leave_groups(self) -> bool:
        """Return whether the engine can go on: not if it is one of several ranks, nor with half
        of its weights.
        """
        if self._ranks.size > 1:
            return False
        return not self._replacement.broken

    def close(self) -> None:
        """Free the weights and the KV cache; the engine cannot be used any more."""
        self._finish()
        _OPEN.discard(self)
        if hasattr(self, "_llm"):
            del self._llm, self._sleep
            gc.collect()  # an engine and its parts know each other

    def _start(
        self,
        model: ModelConfig,
        settings: Mapping[str, Any],
        options: str,
        kind: DeviceKind,
    ) -> LLM:
        """Build vLLM in a world of process groups of its own. ConfigError, naming ``options``,
        when it cannot run.
        """
        if _OPEN:  # perhaps forgotten, in a run that failed on this worker: this closes it
            gc.collect()
        _OPEN.add(self)
        # until it is closed: vLLM collects five times as it starts, through all that was imported
        gc.freeze()
        if model_parallel_is_initialized():
            raise ConfigError(
                "vLLM runs one engine in a process, and this one has one: close it first, give the "
                "roles workers of "
                "their own (cluster.placement), or take rollout.engine=transformers"
            )
        with self._world.entered():
            self._ranks.join(traits_of(kind).backend)  # a platform of vLLM's may not say its own
        try:
            with self._world.entered(), vllm_process.untouched(self._ranks.host), self._eager():
                return _build(model.path, settings, self._note_failure)
        except Exception as error:  # vLLM raises anything from ValueError to AssertionError
            reason = self._ranks.failure_elsewhere()
            if reason is None:
                reason = _innermost(error)
                if self._ranks.size > 1 and is_of_collective(_first_cause(error)):
                    raise PeerError(
                        f"vLLM could not start: a collective of its {self._ranks.size} ranks "
                        f"failed: {reason}"
                    ) from error
            raise ConfigError(
                f"model.path={model.path!r}: vLLM cannot run it with {options}: {reason}; change "
                "what does not fit or take rollout.engine=transformers"
            ) from error

    def _note_failure(self, error: Exception) -> None:
        """Tell the other ranks why this one cannot start, unless that is what happened to another:
        the reason there is the one to know.
        """
        if is_of_collective(_first_cause(error)) or self._ranks.failure_elsewhere() is not None:
            return
        self._ranks.note_failure(_innermost(error))

    def _eager(self) -> Any:
        """Switch torch.compile off on a CPU, where it would spend 23 seconds in a C++ compiler."""
        return torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()

    def _admit(self, queue: RequestQueue, running: dict[str, _Running]) -> bool:
        """Pass vLLM as many requests as there is room for. Return whether any are under way."""
        room = self._max_rows - len(running)
        for ticket, request in queue.next(room, wait=not running) if room else ():
            check_room(request, self.context_length, _ROOM, _MORE_ROOM)
            name = str(next(self._numbers))
            params = request_params(
                request.seed, request.sampling, self._end_tokens, request.begun, self._logprobs_mode
            )
            prompt = prompt_of(request, self.processor, self._llm.llm_engine)
            self._llm.llm_engine.add_request(name, prompt, params, lora_request=self._slots.chosen)
            running[name] = _Running(ticket, request)
        return bool(running)

    def _tell_cache(self) -> None:
        """Say how full the KV cache is, and how many requests wait for room in it."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._note_cache(cache_usage(scheduler), scheduler.get_request_counts()[1])

    def _generation(self, output: RequestOutput, prompt: int) -> Generation:
        """Return vLLM's output as a Generation. RunError for a log-probability that is not
        finite.
        """
        (sample,) = output.outputs
        tokens = list(sample.token_ids)
        logprobs = token_logprobs(sample.logprobs, self._logprobs_mode)
        assert len(logprobs) == len(tokens)
        if not all(map(isfinite, logprobs)):
            raise RunError(
                f"the model gives logits that are not finite (weights of version {self.version})"
            )
        reason = FinishReason.STOP if sample.finish_reason == "stop" else FinishReason.LENGTH
        known = prompt + len(tokens) - 1
        routes = None if self._routes is None else self._routes.take(output.request_id, known)
        return Generation(tokens, logprobs, reason, routes)


def _build(path: str, settings: Mapping[str, Any], note: Callable[[Exception], None]) -> LLM:
    """Build vLLM and generate one token, since some of what it cannot do shows only then. A
    failure is noted, and cleans up, which ends the connections to other ranks.
    """
    with SeparateClasses() as classes, without_queues():
        try:
            llm = LLM(model=path, **settings)
        except Exception as error:
            note(error)
            cleanup_dist_env_and_memory()
            raise
        llm.apply_model(classes.separate)
    try:
        llm.collective_rpc(use_logprobs_mode, args=(settings["logprobs_mode"],))
        params = request_params(0, Sampling(max_tokens=1), [])
        # on CPUs its kernels for gated delta rules take no prompt of one token
        llm.generate([TokensPrompt(prompt_token_ids=[0, 0])], params, use_tqdm=False)
    except Exception as error:
        note(error)
        llm.llm_engine.engine_core.shutdown()
        raise
    return llm


def _shut_down(llm: LLM, world: EngineWorld, on_cpu: bool) -> None:
    collections = vllm_process.no_collections() if on_cpu else nullcontext()
    with world.entered(), vllm_process.untouched(), collections:
        llm.llm_engine.engine_core.shutdown()


def _first_cause(error: BaseException) -> BaseException:
    """Return the exception that vLLM has wrapped in others of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _innermost(error: BaseException) -> str:
    """Return the first line of the first cause."""
    error = _first_cause(error)
    lines = [line for line in str(error).strip().splitlines() if "validation error" not in line]
    return lines[0].strip() if lines else type(error).__name__
