"""A server of SGLang: what it says of itself, and how it loads weights and generates. Written
against the HTTP API in the source of release 0.5.23, which runs in no test.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from siirl_dask.config import Dtype, ModelConfig
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout.engine import GenerationRequest
from siirl_dask.rollout.server_engine.answers import ServedResponse, read_sglang_answer
from siirl_dask.rollout.server_engine.connection import SHOWN, Server, ServerFacts, Tries
from siirl_dask.rollout.server_engine.same_model import check_config, config_here
from siirl_dask.rollout.sglang_engine.requests import sampling_params

_EXPECTED: Mapping[str, tuple[Any, str]] = {
    "enable_deterministic_inference": (True, "seeds of rows count with it alone"),
    "preferred_sampling_params": (None, "they change what a request leaves open"),
    "allow_auto_truncate": (False, "it cuts prompts and responses without a word"),
    "rl_on_policy_target": (None, "it rounds log-probs to bfloat16"),
    "speculative_algorithm": (None, "its tokens are drawn in another way"),
    "weight_cache_mode": ("off", "it takes no new weights then"),
    "disaggregation_mode": ("null", "a request would need two servers"),
    "weight_version": ("default", "by it one is known that was started again"),
    "json_model_override_args": ("{}", "the trainer computes as the model's config.json says"),
}
"""Arguments of the server by which its samples would be others, or none, with the value that they
must have and the reason."""
_AUTO = "auto"
_FEWER_BITS: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "modelopt_quant": (None,),
    "torchao_config": (None, ""),
    "kv_cache_dtype": (_AUTO,),
}
"""Arguments with fewer bits than the trainer's, by which log-probs would be others, with the values
that they may have; a release may not have one. Keys and values may have the model's number type."""
_NOT_LOADED = 400
"""Status by which SGLang says that it has not loaded weights, or not forgotten the older ones' cache."""


class SglangServer(Server):
    """One server of SGLang 0.5.23."""

    _settings: Mapping[str, Any] | None = None
    """Arguments of the server, as it says them, once it is examined."""

    async def examine(self, *, patiently: bool = True) -> ServerFacts:
        """See ``Server``."""
        found = await self.describe("/server_info", patiently=patiently)
        try:
            path = str(found["model_path"])
            dtype = str(found["dtype"]).removeprefix("torch.")
            device = str(found["device"])
            longest = int(found["max_req_input_len"])
            settings = {name: found[name] for name in _EXPECTED}
            settings |= {"dtype": dtype, "enable_fp32_lm_head": found["enable_fp32_lm_head"]}
            settings |= {name: found[name] for name in _FEWER_BITS if name in found}
            settings["model_path"] = path
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.url}: it does not describe itself as a server of SGLang 0.5.23 does: "
                f"{type(error).__name__}: {error}; servers of vLLM need another rollout.sampler "
                "than sglang"
            ) from error
        self._settings = settings
        return ServerFacts(
            longest,
            f"it has {path}, computes in {dtype} on {device} and takes {longest:,} tokens",
        )

    def check(self, model: ModelConfig) -> None:
        """See ``Server``."""
        if self._settings is None:
            raise RuntimeError(f"{self.url} is not examined")
        for name, (expected, reason) in _EXPECTED.items():
            if self._settings[name] != expected:
                raise ConfigError(
                    f"{self.url}: its {_flag(name)} is {self._settings[name]!r}: {reason}; start it with "
                    f"{expected!r}"
                )
        dtype = self._settings["dtype"]
        self._check_bits(self._settings, dtype)
        if model.dtype is not Dtype.auto and dtype != model.dtype:
            raise ConfigError(
                f"{self.url}: its --dtype is {dtype}, and model.dtype is {model.dtype}; start it "
                f"with --dtype {model.dtype}"
            )
        float32_head = self._settings["enable_fp32_lm_head"]
        if float32_head != model.float32_head:
            raise ConfigError(
                f"{self.url}: its --enable-fp32-lm-head is {float32_head}, and model.float32_head "
                f"is {model.float32_head}: expected the same of both"
            )
        config = config_here(self._settings["model_path"])
        if config is not None:
            cure = f"start it with --model-path {model.path}"
            check_config(model.path, config, self.url, cure)

    def _check_bits(self, settings: Mapping[str, Any], dtype: str) -> None:
        """Raise ConfigError for weights, or keys and values, with fewer bits than the trainer's."""
        for name, allowed in _FEWER_BITS.items():
            found = settings.get(name, allowed[0])
            if name == "kv_cache_dtype" and found == "bf16":
                found = str(Dtype.bfloat16)
            if name == "kv_cache_dtype":
                allowed = (*allowed, dtype)
            if found not in allowed:
                raise ConfigError(
                    f"{self.url}: its {_flag(name)} is {found!r:.60}: its log-probs follow from fewer "
                    f"bits than the trainer's; start it without {_flag(name)}"
                )

    async def label(self) -> str:
        """See ``Server``."""
        return await self.label_at("/model_info")

    async def load(self, folder: Path, label: str) -> None:
        """See ``Server``. SGLang ends the requests that it has before it loads, forgets what it has
        read of prompts, and takes weights and label in one call.

        It cannot forget that while it takes back requests whose callers are gone, such as those of a
        worker that was killed: then it has failed (400), and is asked again.
        """
        path = "/update_weights_from_disk"
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        answer = await self.patiently(
            path,
            lambda: self.ask_once("POST", path, body, failures=(_NOT_LOADED,)),
            must_do_it=True,
        )
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise RunError(f"{self.url}: it could not load weights: {answer!r:.{SHOWN}}")

    async def respond(
        self, request: GenerationRequest, end_tokens: Collection[int], tries: Tries
    ) -> ServedResponse:
        """See ``Server``. ConfigError for sampling that SGLang cannot do with seeds."""
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": sampling_params(request, end_tokens),
            "return_logprob": True,
        }
        return await self.generate(
            "/generate",
            body,
            lambda found: read_sglang_answer(found, request, end_tokens, self.url),
            tries,
        )

    def advice(self, code: int, path: str) -> str:
        """See ``Server``."""
        if code == 404:
            return (
                "; expected a server of SGLang, by rollout.sampler=sglang: servers of vLLM need "
                "another rollout.sampler"
            )
        if code in (401, 403):
            return "; start SGLang's server without --api-key and --admin-api-key"
        return ""


def _flag(name: str) -> str:
    """Return an argument as the server's command line has it."""
    return f"--{name.replace('_', '-')}"
