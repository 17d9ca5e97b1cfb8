"""A server of vLLM: what it says of itself, and how it loads weights and generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.devices import DeviceKind
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout.engine import GenerationRequest
from siirl_dask.rollout.server_engine.answers import ServedResponse, read_vllm_answer
from siirl_dask.rollout.server_engine.connection import (
    LOADING,
    OutOfReachError,
    Server,
    ServerFacts,
    Tries,
    plain,
)
from siirl_dask.rollout.server_engine.same_model import check_config, check_overrides, config_here
from siirl_dask.rollout.server_engine.vllm_settings import refusal_of
from siirl_dask.rollout.vllm_engine.other_logprobs import (
    check_engine_length,
    check_logprobs_of_vllm,
)
from siirl_dask.rollout.vllm_engine.row_parameters import EXACT, logprobs_mode, row_parameters

EXTENSION = "siirl_dask.rollout.server_engine.extension.LoadsWeights"
SAMPLER = "siirl_dask.rollout.vllm_engine.token_choice:VllmTokenSampler"
_GENERATE = "/inference/v1/generate"
_HEAD = "head_dtype"
"""Key of ``--hf-overrides`` for the number type of the head's products."""
_RESUME_SECONDS = 20.0
"""Most seconds for a server that could not load weights to say that it goes on."""


@dataclass(frozen=True, slots=True)
class _VllmFacts:
    """A server's own description of itself."""

    model: str
    """Path or name of the model that it was started with."""
    logprobs_mode: str
    dtype: str
    """Number type of its computation, such as ``float32``."""
    longest: int
    """Most tokens of a prompt and its response."""
    on_cpu: bool
    has_extension: bool
    """Whether its workers can load weights as ``extension`` does."""
    generation_config: str
    processors: tuple[str, ...]
    """Logits processors, which run on all requests."""
    overrides: Mapping[str, Any]
    """Keys of the model's config that it was started with other values of."""
    refusal: str | None
    """A further setting by which its samples would be others, with the cure; None: there is none."""
    config: Mapping[str, Any] | None = None
    """Config of its model; None where it does not say it."""

    @property
    def head_dtype(self) -> str | None:
        """Number type of the head's products, where it is given; None: that of all others."""
        given = self.overrides.get(_HEAD)
        if given is None:
            return None
        return str(given).removeprefix("torch.")


class VllmServer(Server):
    """One server of vLLM 0.32."""

    def __init__(
        self,
        url: str,
        rollout: RolloutConfig,
        connections: int,
        progress: Callable[[], None],
    ) -> None:
        """``connections`` and ``progress`` are those of ``Server``."""
        super().__init__(url, rollout.server, connections, progress)
        self._mode = logprobs_mode(rollout)
        self._found: _VllmFacts | None = None

    async def examine(self, *, patiently: bool = True) -> ServerFacts:
        """See ``Server``. ConfigError also for a server without its API for developers, or that
        takes no tokens.
        """
        described = await self.describe("/server_info?config_format=json", patiently=patiently)
        facts = self._read(described)
        await self._check_generates()
        self._found = replace(facts, config=await self._config(facts, patiently=patiently))
        device = "a device"
        if facts.on_cpu:
            device = "a CPU"
        paused = ""
        if await self._is_paused():
            paused = (
                "; it is paused, perhaps by a worker that was killed while it loaded weights: the "
                "next run lets it go on, as POST /resume does"
            )
        return ServerFacts(
            facts.longest,
            f"it has {facts.model}, computes in {facts.dtype} on {device}, takes "
            f"{facts.longest:,} tokens and reports {facts.logprobs_mode}{paused}",
        )

    def check(self, model: ModelConfig) -> None:
        """See ``Server``."""
        found = self._facts
        if found.logprobs_mode != self._mode:
            raise ConfigError(
                f"{self.url}: its --logprobs-mode is {found.logprobs_mode}, and {self._mode} is "
                "what rollout.sampler and rollout.temperature need; start it by python -m "
                "siirl_dask.rollout.server_engine.serve MODEL, or with --logprobs-mode "
                f"{self._mode} and rollout.sampler=vllm"
            )
        self._check_processors(found.processors)
        if found.refusal is not None:
            raise ConfigError(f"{self.url}: {found.refusal}")
        if found.generation_config != "vllm":
            raise ConfigError(
                f"{self.url}: its --generation-config is {found.generation_config}, by which "
                "samples follow settings of the model's folder; start it with --generation-config "
                "vllm"
            )
        if model.dtype is not Dtype.auto and found.dtype != model.dtype:
            raise ConfigError(
                f"{self.url}: it computes in {found.dtype}, and model.dtype is {model.dtype}; "
                f"start it with --dtype {model.dtype}, or give model.dtype={found.dtype}"
            )
        self._check_head(model)
        self._check_model(model)
        cure = f"start it with --max-model-len {model.longest_row}"
        check_engine_length(model, found.longest, f"{self.url}: --max-model-len", cure)
        if found.on_cpu:
            check_logprobs_of_vllm(model.path, 0, DeviceKind.CPU)
        if found.on_cpu and not found.has_extension:
            raise ConfigError(
                f"{self.url}: on a CPU vLLM leaves some weights as they were, without a word; "
                f"start it with --worker-extension-cls {EXTENSION}, or by python -m "
                "siirl_dask.rollout.server_engine.serve"
            )

    def _check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError for a server whose model takes the weights and computes otherwise."""
        found = self._facts
        check_overrides(
            model.path,
            found.overrides,
            f"{self.url}: by its --hf-overrides",
            "start it without them, or write them into the config.json of model.path",
        )
        config = found.config
        if config is None:
            config = config_here(found.model)
        if config is not None:
            cure = f"start it with the model of {model.path}"
            check_config(model.path, config, self.url, cure)

    async def _config(self, facts: _VllmFacts, *, patiently: bool) -> Mapping[str, Any] | None:
        """Return the config of the server's model, which all its ranks have; None where it cannot
        say it.
        """
        if not facts.has_extension:
            return None
        found = await self.describe(
            "/collective_rpc",
            patiently=patiently,
            method="POST",
            body={"method": "siirl_model_config"},
        )
        match found:
            case {"results": [dict() as config, *_]}:
                return config
        raise ConfigError(
            f"{self.url}: it gave {found!r:.200} as the config of its model; start it with the "
            "siirl_dask of this host"
        )

    async def _is_paused(self) -> bool:
        """Return whether a server says that it is paused; one that does not say it matters no more."""
        try:
            return await self._says_paused()
        except OSError:
            return False

    async def _says_paused(self) -> bool:
        """Return whether a server says that it is paused. OSError as ``fetch``."""
        response = await self.fetch("GET", "/is_paused", None)
        if response.code != 200:
            return False
        return bool(plain(response, self.url) == {"is_paused": True})

    async def resume(self) -> None:
        """See ``Server``."""
        await self.ask("POST", "/resume")

    async def go_on(self) -> str | None:
        """Let a server go on that is paused; return a sentence about it, None for one that is not, or
        is out of reach.

        One that does not answer in time is perhaps still loading weights for a worker that is gone,
        and does it afterwards.
        """
        try:
            if not await self._says_paused():
                return None
        except TimeoutError:
            await self._resumed()
            return None
        except OSError:
            return None
        state = await self._resumed()
        return (
            f"{self.url} was left paused, as by a worker that was killed while it loaded weights: "
            f"{state}"
        )

    def _check_head(self, model: ModelConfig) -> None:
        """Raise ConfigError for a server whose head computes in another number type than the
        trainer's.
        """
        found = self._facts
        is_float32 = found.head_dtype == Dtype.float32
        if found.dtype == Dtype.float32 or is_float32 == model.float32_head:
            return
        cure = "start it without head_dtype in --hf-overrides, or give model.float32_head=true"
        if model.float32_head:
            cure = f'start it with --hf-overrides \'{{"{_HEAD}": "{Dtype.float32}"}}\''
        computed = found.dtype
        if found.head_dtype is not None:
            computed = found.head_dtype
        raise ConfigError(
            f"{self.url}: its head computes in {computed}, and model.float32_head is "
            f"{model.float32_head}; {cure}"
        )

    def _check_processors(self, processors: Sequence[str]) -> None:
        """Raise ConfigError for a server that draws its tokens otherwise: without the sampler it
        takes the likeliest ones, and reports logits.
        """
        others = [name for name in processors if name != SAMPLER]
        if others:
            raise ConfigError(
                f"{self.url}: its --logits-processors are {', '.join(processors)}, and those other "
                f"than {SAMPLER} change what is sampled; start it without them"
            )
        if self._mode == EXACT and not processors:
            raise ConfigError(
                f"{self.url}: it has no --logits-processors, and rollout.sampler=exact needs "
                f"{SAMPLER}; start it by python -m siirl_dask.rollout.server_engine.serve MODEL, "
                f"or with --logits-processors {SAMPLER}"
            )

    async def label(self) -> str:
        """See ``Server``."""
        return await self.label_at("/weight_info")

    async def load(self, folder: Path, label: str) -> None:
        """See ``Server``. Every rank of the server calls the method that loads them."""
        method = "reload_weights"
        options = {"weights_path": str(folder)}
        if self._facts.has_extension:
            method = "load_siirl_weights"
            options = {"folder": str(folder)}
        begun = f"{LOADING}{label}"
        try:
            await self.patiently(
                "/collective_rpc", lambda: self._load(method, options, label), must_do_it=True
            )
        except RunError as error:
            state = await self._resumed()
            raise RunError(
                f"{error}; the label of its weights is {begun!r}, and {state}"
            ) from error
        except BaseException:
            await self._resumed()
            raise

    async def _load(self, method: str, options: dict[str, str], label: str) -> None:
        begun = f"{LOADING}{label}"
        await self.ask_once("POST", "/pause?mode=keep")
        await self.ask_once("POST", "/update_weight_version", {"new_version": begun})
        await self.ask_once("POST", "/collective_rpc", {"method": method, "kwargs": options})
        # also of requests under way: a server that was started again has some from before it had
        # its weights
        forgot = await self.ask_once("POST", "/reset_prefix_cache?reset_running_requests=true")
        if not isinstance(forgot, dict) or forgot.get("success") is not True:
            raise OutOfReachError("it still has keys and values of the weights before")
        found = await self.ask_once("GET", "/weight_info")
        if not isinstance(found, dict) or found.get("weight_version") != begun:
            raise OutOfReachError("it was started again while it loaded weights")
        await self.ask_once("POST", "/update_weight_version", {"new_version": label})
        await self.ask_once("POST", "/resume")

    async def _resumed(self) -> str:
        """Let a server go on that has not loaded weights: it is paused, and others would wait for it
        for ever. Returns how that went, for errors.
        """
        try:
            async with asyncio.timeout(_RESUME_SECONDS):
                response = await self.fetch("POST", "/resume", None)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if response.code == 200:
                return "it goes on with some of either version until the next run gives it others"
            problem = str(response.code)
        return f"it is perhaps still paused ({problem}): a run, or POST /resume, lets it go on"

    async def respond(
        self, request: GenerationRequest, end_tokens: Collection[int], tries: Tries
    ) -> ServedResponse:
        """See ``Server``. ConfigError for sampling whose log-probs the server does not report."""
        body = {
            "token_ids": list(request.prompt),
            "sampling_params": row_parameters(
                request.seed, request.sampling, list(end_tokens), request.begun, self._mode
            ),
        }
        return await self.generate(
            _GENERATE,
            body,
            lambda found: read_vllm_answer(found, request, end_tokens, self._mode, self.url),
            tries,
        )

    def advice(self, code: int, path: str) -> str:
        """See ``Server``."""
        if "/inference" in path and code in (403, 404):
            return "; start vLLM's server with --enable-scale-out"
        if code == 404:
            return (
                "; start vLLM's server with VLLM_SERVER_DEV_MODE=1, or by python -m "
                "siirl_dask.rollout.server_engine.serve MODEL; for servers of SGLang give "
                "rollout.sampler=sglang"
            )
        return ""

    async def _check_generates(self) -> None:
        """Raise ConfigError for a server that takes no requests by tokens: it would refuse the
        first one of the run.
        """
        try:
            response = await self.fetch("GET", _GENERATE, None)
        except OSError:
            return  # it was there a moment ago, and is asked again
        if response.code == 404:  # one that takes them answers that they are not got
            raise ConfigError(
                f"{self.url}: it takes no requests at {_GENERATE}{self.advice(404, _GENERATE)}"
            )

    @property
    def _facts(self) -> _VllmFacts:
        if self._found is None:
            raise RuntimeError(f"{self.url} is not examined")
        return self._found

    def _read(self, found: Any) -> _VllmFacts:
        try:
            config = found["vllm_config"]
            model = config["model_config"]
            dtype = str(model["dtype"]).removeprefix("torch.")
            return _VllmFacts(
                model=str(model["model"]),
                logprobs_mode=str(model["logprobs_mode"]),
                dtype=dtype,
                longest=int(model["max_model_len"]),
                on_cpu=str(config["device_config"]["device"]) == "cpu",
                has_extension=config["parallel_config"]["worker_extension_cls"] == EXTENSION,
                generation_config=str(model["generation_config"]),
                processors=_processors(model["logits_processors"]),
                overrides=_mapping(model["hf_overrides"]),
                refusal=refusal_of(found, dtype),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.url}: it does not describe itself as a server of vLLM 0.32 does: "
                f"{type(error).__name__}: {error}; for servers of SGLang give "
                "rollout.sampler=sglang"
            ) from error


def _processors(found: Sequence[object] | None) -> tuple[str, ...]:
    """Return the names of logits processors."""
    if found is None:
        return ()
    return tuple(str(name) for name in found)


def _mapping(found: object) -> Mapping[str, Any]:
    """Return overrides of the model's config; none where they are a function, shown by its name."""
    if not isinstance(found, dict):
        return {}
    return found
