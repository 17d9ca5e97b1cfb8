"""Groups of what generates and what is generated: the model, sampling, rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from siirl_dask.config.checks import above, at_least, parse_bytes
from siirl_dask.errors import ConfigError


class Engine(StrEnum):
    """What generates; see docs/engines.md."""

    transformers = "transformers"
    vllm = "vllm"
    auto = "auto"
    """vLLM where it is installed, transformers elsewhere."""


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class WeightsBy(StrEnum):
    """How the policy's new weights go to the engines; see docs/engines.md."""

    auto = "auto"
    """The broadcast where it is nccl's or hccl's, rows elsewhere."""
    rows = "rows"
    """As all rows go, through the host's memory."""
    broadcast = "broadcast"
    """From the device of one of the policy's workers to those of the engines, always."""


class PromptRows(StrEnum):
    """On which of the workers that generate a prompt is sampled from."""

    anywhere = "anywhere"
    """That which loaded it."""
    balanced = "balanced"
    """The most costly first, each on that which has least to do."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = "???"
    """A folder that transformers loads: config, weights, tokenizer."""
    dtype: Dtype = Dtype.float32


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    engine: Engine = Engine.auto
    n: int = 8
    """Samples per prompt: the group that an advantage compares."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are not drawn; 0 is off."""
    max_response_length: int = 256
    """Tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, besides those that the model and its tokenizer name."""
    max_rows: int = 256
    """Rows generated at once on a worker."""
    max_staleness: int = 0
    """Steps by which the weights that sample may be behind those that are trained: so far ahead is generated while
    training goes on. Above 0 the nodes that generate need workers of their own, and ``algorithm.correction`` is
    truncated_is if none is given.
    """
    partial: bool = False
    """A response stops after ``max_tokens_per_step`` tokens and goes on in the next step, with the weights of then. Its
    group is trained when all of it is there; ``max_staleness`` must allow for the steps that takes.
    """
    max_tokens_per_step: int | None = None
    ahead: int | None = None
    """Steps generated ahead of training; none, what ``max_staleness`` leaves when partial responses have theirs."""
    weights_bucket: str = "256MiB"
    """Of the policy's new weights, what is on its way to the engines at once; a parameter that is larger goes alone."""
    weights_by: WeightsBy = WeightsBy.auto
    """How they go: ``auto`` broadcasts them from device to device where policy and engines have workers of their own
    and each of these an accelerator; ``rows``; ``broadcast``, or the run is refused.
    """
    expected_length: str | None = None
    """Column of the dataset that says how many tokens responses to the prompt are expected to have. By it the workers
    share the prompts, and begin with the longest; samples do not depend on it.
    """
    rows: PromptRows | None = None
    """How they share them: ``anywhere`` or ``balanced``; none, ``balanced`` with ``expected_length``."""
    work_stealing: bool | None = None
    """A worker that has nothing left to begin takes over what waits at others, beyond their ``max_rows``; none, so
    where each worker has an engine of its own.
    """
    tensor_parallel_size: int = 1
    """So many consecutive workers of the role are one engine of vLLM, each with a slice of the model."""
    gpu_memory_utilization: float = 0.9
    """This and what follows is for vLLM. Share of an accelerator's memory that it takes, weights and caches, where
    ``kv_cache_memory`` is not given.
    """
    kv_cache_memory: str | None = None
    """Of the cache of keys and values on a worker, such as ``4GiB``; where none is given, 1GiB on a CPU."""
    max_num_seqs: int | None = None
    """Rows in an engine's batch; none, ``max_rows`` for each of its workers."""
    max_num_batched_tokens: int | None = None
    """Tokens in a batch; none, vLLM's own choice."""
    enforce_eager: bool | None = None
    """Without compiled graphs; none, so on a CPU only."""
    enable_prefix_caching: bool = True
    """Read a prompt once for all its samples."""
    sleep_level: int = 1
    """What it gives back of an accelerator while others compute on it: 0, nothing; 1, the cache, and the weights to the
    host's memory; 2, both altogether, where each update's weights are loaded before it generates again.
    """
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of ``vllm.LLM``, such as ``{max_model_len: 4096}``."""

    @property
    def n_and_greedy(self) -> int:
        """Responses to each prompt where the most likely one is added to the samples."""
        return self.n + 1

    @property
    def rows_per_prompt(self) -> int:
        """Of a step, at most: partial responses of steps before come as well."""
        return self.n * self.steps_per_response

    @property
    def steps_per_response(self) -> int:
        """In which a response is generated, at most."""
        return -(-self.max_response_length // self.max_tokens_per_step) if self.max_tokens_per_step else 1

    def __post_init__(self) -> None:
        at_least("rollout", 1, n=self.n, max_response_length=self.max_response_length, max_rows=self.max_rows)
        at_least("rollout", 1, tensor_parallel_size=self.tensor_parallel_size)
        at_least("rollout", 0, top_k=self.top_k, max_staleness=self.max_staleness)
        above("rollout", 0, temperature=self.temperature)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p={self.top_p}: expected more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"rollout.min_p={self.min_p}: expected 0 to 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"rollout.gpu_memory_utilization={self.gpu_memory_utilization}: expected more than 0 and at most 1"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if (given := getattr(self, name)) is not None:
                at_least("rollout", 1, **{name: given})
        if wrong := [token for token in self.stop_token_ids if token < 0]:
            raise ConfigError(
                f"rollout.stop_token_ids={self.stop_token_ids}: {wrong[0]} is no token; expected ids from 0"
            )
        if self.rows is None:
            self.rows = PromptRows.anywhere if self.expected_length is None else PromptRows.balanced
        self._check_ahead()
        self._check_tensor_parallel()
        if parse_bytes("rollout.weights_bucket", self.weights_bucket) < 1:
            raise ConfigError(f"rollout.weights_bucket={self.weights_bucket!r}: expected at least 1 byte")
        if self.sleep_level not in (0, 1, 2):
            raise ConfigError(f"rollout.sleep_level={self.sleep_level}: expected 0, 1 or 2")
        if self.kv_cache_memory is not None and parse_bytes("rollout.kv_cache_memory", self.kv_cache_memory) < 2**20:
            raise ConfigError(f"rollout.kv_cache_memory={self.kv_cache_memory!r}: expected at least 1MiB")
        if self.engine_kwargs and self.engine is Engine.transformers:
            raise ConfigError(
                f"rollout.engine_kwargs={self.engine_kwargs}: they are vLLM's, and rollout.engine is transformers; "
                "leave them out or take rollout.engine=vllm"
            )

    def _check_tensor_parallel(self) -> None:
        size = self.tensor_parallel_size
        if "tensor_parallel_size" in self.engine_kwargs:
            given = self.engine_kwargs["tensor_parallel_size"]
            raise ConfigError(
                f"rollout.engine_kwargs.tensor_parallel_size={given}: the workers of an engine are the run's; give "
                f"rollout.tensor_parallel_size={given} instead"
            )
        if size > 1 and self.engine is Engine.transformers:
            raise ConfigError(
                f"rollout.tensor_parallel_size={size}: rollout.engine=transformers generates on one device; take "
                "rollout.engine=vllm, or leave it at 1"
            )
        if size > 1 and self.work_stealing:
            raise ConfigError(
                f"rollout.work_stealing=true and rollout.tensor_parallel_size={size}: the workers of an engine begin "
                "all rows together, so that there are none to take over; leave work_stealing out, or give false"
            )

    def _check_ahead(self) -> None:
        if self.partial != (self.max_tokens_per_step is not None):
            raise ConfigError(
                f"rollout.partial={self.partial} and rollout.max_tokens_per_step={self.max_tokens_per_step}: "
                "expected both or neither, as in rollout.partial=true rollout.max_tokens_per_step=512"
            )
        if self.max_tokens_per_step is not None:
            at_least("rollout", 1, max_tokens_per_step=self.max_tokens_per_step)
        left = self.max_staleness - (self.steps_per_response - 1)
        self.ahead = left if self.ahead is None else self.ahead
        if not 0 <= self.ahead <= left:
            raise ConfigError(
                f"rollout.max_staleness={self.max_staleness}: expected at least the steps ahead, "
                f"{max(self.ahead, 0)} (rollout.ahead), and {self.steps_per_response - 1} more for a response of "
                f"{self.steps_per_response} steps (rollout.max_response_length, rollout.max_tokens_per_step)"
            )


@dataclass(kw_only=True, slots=True)
class RewardsConfig:
    function: str = "siirl_dask.rewards:exact_match"
    """``module:function``, called as ``reward(prompt=, response=, answer=)`` for each row."""
    processes: int = 0
    """On each worker, processes that call it; 0 calls it in the worker itself."""
    timeout: float | None = None
    """Seconds for one row. A function that is not async needs ``processes`` for it."""
    concurrency: int = 64
    """Calls of an async function at once on a worker."""
    max_failures: int = 0
    """Rows of a step, over all workers, that may fail to be scored: they are left out of the loss."""

    def __post_init__(self) -> None:
        at_least("rewards", 0, processes=self.processes, max_failures=self.max_failures)
        at_least("rewards", 1, concurrency=self.concurrency)
        if self.timeout is not None:
            above("rewards", 0, timeout=self.timeout)
