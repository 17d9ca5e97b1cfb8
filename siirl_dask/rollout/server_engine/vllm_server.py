"""A server of vLLM: what it says of itself, and how it loads weights and generates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.devices import DeviceKind
from siirl_dask.errors import ConfigError
from siirl_dask.rollout.engine import GenerationRequest
from siirl_dask.rollout.server_engine.answers import ServedResponse, read_vllm_answer
from siirl_dask.rollout.server_engine.connection import OutOfReachError, Server, ServerFacts
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
    speculates: bool
    """Whether it drafts tokens before it computes them."""
    head_dtype: str | None
    """Number type of the head's products, where it is given; None: that of all others."""


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
        self._found = facts
        device = "a device"
        if facts.on_cpu:
            device = "a CPU"
        return ServerFacts(
            facts.longest,
            f"it has {facts.model}, computes in {facts.dtype} on {device}, takes "
            f"{facts.longest:,} tokens and reports {facts.logprobs_mode}",
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
        if found.speculates:
            raise ConfigError(
                f"{self.url}: it drafts tokens, and draws them in another way than a row's seed says; "
                "start it without --speculative-config"
            )
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
        await self.patiently("/collective_rpc", lambda: self._load(method, options, label))

    async def _load(self, method: str, options: dict[str, str], label: str) -> None:
        begun = f"loading {label}"
        await self.ask_once("POST", "/pause?mode=keep")
        await self.ask_once("POST", "/update_weight_version", {"new_version": begun})
        await self.ask_once("POST", "/collective_rpc", {"method": method, "kwargs": options})
        # also of requests under way: a server that was started again has some from before it had
        # its weights
        await self.ask_once("POST", "/reset_prefix_cache?reset_running_requests=true")
        found = await self.ask_once("GET", "/weight_info")
        if not isinstance(found, dict) or found.get("weight_version") != begun:
            raise OutOfReachError("it was started again while it loaded weights")
        await self.ask_once("POST", "/update_weight_version", {"new_version": label})
        await self.ask_once("POST", "/resume")

    async def respond(
        self, request: GenerationRequest, end_tokens: Collection[int]
    ) -> ServedResponse:
        """See ``Server``. ConfigError for sampling whose log-probs the server does not report."""
        body = {
            "token_ids": list(request.prompt),
            "sampling_params": row_parameters(
                request.seed, request.sampling, list(end_tokens), request.begun, self._mode
            ),
        }
        found = await self.generate(_GENERATE, body)
        return read_vllm_answer(found, request, end_tokens, self._mode, self.url)

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

    def _read(self, found: object) -> _VllmFacts:
        try:
            config = found["vllm_config"]  # type: ignore[index]  # a TypeError is named below
            model = config["model_config"]
            return _VllmFacts(
                model=str(model["model"]),
                logprobs_mode=str(model["logprobs_mode"]),
                dtype=str(model["dtype"]).removeprefix("torch."),
                longest=int(model["max_model_len"]),
                on_cpu=str(config["device_config"]["device"]) == "cpu",
                has_extension=config["parallel_config"]["worker_extension_cls"] == EXTENSION,
                generation_config=str(model["generation_config"]),
                processors=_processors(model["logits_processors"]),
                speculates=config["speculative_config"] is not None,
                head_dtype=_head_dtype(model["hf_overrides"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
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


def _head_dtype(overrides: object) -> str | None:
    """Return the number type of the head that overrides of the model's config give; None where they
    give none.
    """
    if not isinstance(overrides, dict) or overrides.get(_HEAD) is None:
        return None
    return str(overrides[_HEAD]).removeprefix("torch.")
