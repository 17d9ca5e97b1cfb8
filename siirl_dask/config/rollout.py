"""Config groups of generation: the model, sampling, engines and rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from siirl_dask.config.checks import above, absolute, at_least, parse_bytes
from siirl_dask.errors import ConfigError


class Engine(StrEnum):
    """Engine that generates; see docs/engines.md."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"
    """Never chosen by ``auto``."""
    auto = "auto"
    """vLLM if it is installed, else transformers."""


class Sampler(StrEnum):
    """Code that draws tokens; see docs/engines.md."""

    exact = "exact"
    """Ours: a token depends on its row's seed, its position and its logits alone, in any batch and with any engine."""
    vllm = "vllm"
    """vLLM's own, with a generator for each row."""
    sglang = "sglang"
    """SGLang's own: a token depends on its row's seed, its place in the sequence and its logits."""


class Dtype(StrEnum):
    """Number type of a model's weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class WeightSync(StrEnum):
    """Transfer of the policy's new weights to the engines; see docs/engines.md."""

    auto = "auto"
    """A broadcast if its backend is nccl or hccl, else rows."""
    rows = "rows"
    """Rows of the data plane, through the host's memory."""
    broadcast = "broadcast"
    """A broadcast from the device of one policy worker to the engines' devices; a run that cannot do so is refused."""


class PromptPlacement(StrEnum):
    """Choice of the rollout worker that samples a prompt."""

    anywhere = "anywhere"
    """The worker that loaded it."""
    balanced = "balanced"
    """Prompts with the longest expected responses first, each to the least loaded worker."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """``model``: the model that is trained and that generates."""

    path: str = "???"
    """Folder with a model that transformers loads: config, weights, tokenizer."""
    dtype: Dtype = Dtype.float32

    def __post_init__(self) -> None:
        self.path = absolute(self.path)


@dataclass(kw_only=True, slots=True)
class VllmConfig:
    """``rollout.vllm``: options that only vLLM reads."""

    gpu_memory_utilization: float | None = None
    """Share of an accelerator's memory for weights and caches, unless ``kv_cache_memory`` is given. None: what the
    other roles on it leave, as ``plan`` says, at most 0.9."""
    kv_cache_memory: str | None = None
    """Size of a worker's cache of keys and values, such as ``4GiB``. None: 1GiB on a CPU."""
    max_num_seqs: int | None = None
    """Most rows in an engine's batch. None: ``rollout.max_rows`` for each of its workers."""
    max_num_batched_tokens: int | None = None
    """Most tokens in an engine's batch. None: vLLM's own choice."""
    enforce_eager: bool | None = None
    """Run without compiled graphs. None: on a CPU only."""
    enable_prefix_caching: bool = True
    """Read a prompt once for all its samples."""
    sleep_level: int = 2
    """Memory that the engine frees on an accelerator while other roles compute on it. 0: none. 1: the cache, and the
    weights move to the host's memory. 2: the same, but weights are forgotten where new ones follow in the same step,
    before anything else asks for them."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of ``vllm.LLM``, such as ``{max_model_len: 4096}``."""

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"rollout.vllm.gpu_memory_utilization={share}: expected more than 0, at most 1; or null, for what the "
                "other roles leave"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if (count := getattr(self, name)) is not None:
                at_least("rollout.vllm", 1, **{name: count})
        if self.sleep_level not in (0, 1, 2):
            raise ConfigError(f"rollout.vllm.sleep_level={self.sleep_level}: expected 0, 1 or 2")
        cache = self.kv_cache_memory
        if cache is not None and parse_bytes("rollout.vllm.kv_cache_memory", cache) < 2**20:
            raise ConfigError(f"rollout.vllm.kv_cache_memory={cache!r}: expected at least 1MiB")
        if "tensor_parallel_size" in self.engine_kwargs:
            size = self.engine_kwargs["tensor_parallel_size"]
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.tensor_parallel_size={size}: the workers of an engine are the run's; "
                f"give rollout.tensor_parallel_size={size} instead"
            )


@dataclass(kw_only=True, slots=True)
class SglangConfig:
    """``rollout.sglang``: options that only SGLang reads."""

    mem_fraction_static: float | None = None
    """Share for weights and caches of the accelerator's memory that is free when SGLang starts. None: what the other
    roles on it leave, as ``plan`` says, at most 0.9."""
    attention_backend: str | None = None
    """Kernels of attention, of those that are deterministic in SGLang. None: triton with ``model.dtype=float32``, else
    SGLang's own choice."""
    disable_radix_cache: bool = False
    """Read each prompt anew for every sample."""
    sleep: bool = True
    """Free the cache while other roles compute on the accelerator, and the weights where new ones follow before
    anything else asks for them."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of ``sglang.Engine``, such as ``{chunked_prefill_size: 2048}``."""

    def __post_init__(self) -> None:
        share = self.mem_fraction_static
        if share is not None and not 0 < share < 1:
            raise ConfigError(
                f"rollout.sglang.mem_fraction_static={share}: expected more than 0 and less than 1; or null, for what "
                "the other roles leave"
            )


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """``rollout``: sampling of responses, and the engine that generates them."""

    engine: Engine = Engine.auto
    n: int = 8
    """Samples per prompt, which form the group that an advantage compares."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens that may be drawn; 0: all."""
    min_p: float = 0.0
    """Least probability of a token that may be drawn, as a share of the likeliest token's; 0: any."""
    sampler: Sampler = Sampler.exact
    """``exact``: a sample depends on its prompt, its seed and the weights alone, with any engine and any layout of the
    run. ``vllm``: vLLM's own sampler, with a seed for each row. ``sglang``: SGLang's own, which its engine needs."""
    max_response_length: int = 256
    """Longest response, in tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, besides those of the model and its tokenizer."""
    max_rows: int = 256
    """Most rows generated at once on a worker."""
    max_staleness: int = 0
    """Steps by which the weights that sample may be older than those that are trained, so that generation runs ahead.
    Above 0 the nodes that generate need workers of their own, and ``algorithm.correction`` defaults to truncated_is."""
    partial: bool = False
    """Generate long responses over several steps: a response stops after ``max_tokens_per_step`` tokens and goes on in
    the next step, with that step's weights. Its group is trained once it is complete; ``max_staleness`` must allow for
    these steps."""
    max_tokens_per_step: int | None = None
    """Most tokens of a response that are generated in one step, with ``partial``."""
    steps_ahead: int | None = None
    """Steps generated ahead of training. None: what ``max_staleness`` leaves after the steps of partial responses."""
    weight_bucket: str = "256MiB"
    """Largest piece of the policy's new weights that is on its way to the engines at once; a larger parameter travels
    alone."""
    weight_sync: WeightSync = WeightSync.auto
    """Transfer of new weights to the engines: ``auto``, ``rows`` or ``broadcast``. ``auto`` broadcasts from device to
    device if policy and engines have workers of their own, each with an accelerator, and else sends rows."""
    expected_length_column: str | None = None
    """Dataset column with the expected number of tokens of a response. Workers share the prompts by it and begin with
    the longest; samples do not depend on it."""
    prompt_placement: PromptPlacement | None = None
    """Choice of the rollout worker that samples a prompt: ``anywhere``, the worker that loaded it; ``balanced``, the
    least loaded worker, longest prompts first. None: ``balanced`` with ``expected_length_column``, else
    ``anywhere``."""
    work_stealing: bool | None = None
    """Let a worker that has nothing left to begin take over rows that wait at others, beyond their ``max_rows``. None:
    on, except with ``tensor_parallel_size`` above 1."""
    router_replay: bool = False
    """Record the experts that each token goes to in the engine, and let the policy replay them (R3,
    arXiv:2510.11370)."""
    tensor_parallel_size: int = 1
    """Number of consecutive workers of the role that form one vLLM engine, each with a slice of the model."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Options that only vLLM reads."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    """Options that only SGLang reads."""

    @property
    def n_and_greedy(self) -> int:
        """Responses to each prompt if the most likely one is added to the samples."""
        return self.n + 1

    @property
    def rows_per_prompt(self) -> int:
        """Most rows of a step per prompt, counting partial responses of earlier steps that end in it."""
        return self.n * self.steps_per_response

    @property
    def steps_per_response(self) -> int:
        """Most steps over which one response is generated."""
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
        if negative := [token for token in self.stop_token_ids if token < 0]:
            raise ConfigError(
                f"rollout.stop_token_ids={self.stop_token_ids}: {negative[0]} is no token; expected ids from 0"
            )
        if parse_bytes("rollout.weight_bucket", self.weight_bucket) < 1:
            raise ConfigError(f"rollout.weight_bucket={self.weight_bucket!r}: expected at least 1 byte")
        if self.prompt_placement is None:
            known = self.expected_length_column is not None
            self.prompt_placement = PromptPlacement.balanced if known else PromptPlacement.anywhere
        self._check_steps_ahead()
        self._check_engine()
        if self.router_replay:
            self._check_replay()

    def _check_engine(self) -> None:
        size = self.tensor_parallel_size
        if size > 1 and self.work_stealing:
            raise ConfigError(
                f"rollout.work_stealing=true and rollout.tensor_parallel_size={size}: the workers of an engine begin "
                "all rows together, so that there are none to take over; leave work_stealing out, or give false"
            )
        self._check_sglang()
        if self.engine is not Engine.transformers:
            return
        if size > 1:
            raise ConfigError(
                f"rollout.tensor_parallel_size={size}: rollout.engine=transformers generates on one device; take "
                "rollout.engine=vllm, or leave it at 1"
            )
        if self.sampler is Sampler.vllm:
            raise ConfigError(
                "rollout.sampler=vllm: it is part of vLLM, and rollout.engine is transformers; take "
                "rollout.sampler=exact or rollout.engine=vllm"
            )
        if self.vllm.engine_kwargs:
            raise ConfigError(
                f"rollout.vllm.engine_kwargs={self.vllm.engine_kwargs}: they are vLLM's, and rollout.engine is "
                "transformers; leave them out or take rollout.engine=vllm"
            )

    def _check_sglang(self) -> None:
        """Raise ConfigError for SGLang's options with another engine, and for what its engine cannot do."""
        used = self.engine is Engine.sglang
        if not used and self.sampler is Sampler.sglang:
            raise ConfigError(
                f"rollout.sampler=sglang: it is part of SGLang, and rollout.engine is {self.engine}; take "
                "rollout.sampler=exact or rollout.engine=sglang"
            )
        if not used and self.sglang != SglangConfig():
            raise ConfigError(
                f"rollout.sglang={self.sglang}: only SGLang reads this, and rollout.engine is {self.engine}; leave it "
                "out or take rollout.engine=sglang"
            )
        if not used:
            return
        refused = {
            f"sampler={self.sampler}": self.sampler is not Sampler.sglang
            and "SGLang draws tokens with a sampler of its own alone; give rollout.sampler=sglang",
            f"tensor_parallel_size={self.tensor_parallel_size}": self.tensor_parallel_size > 1
            and "an SGLang engine is on one worker here; leave it at 1, or take rollout.engine=vllm",
            "router_replay=true": self.router_replay
            and "no routes are recorded in SGLang here; leave it out, or take another engine",
            f"min_p={self.min_p}": self.min_p > 0
            and "SGLang's sampler does not take it together with seeds; leave it at 0, or take another engine",
            f"top_k=1 and rollout.temperature={self.temperature}": self.top_k == 1
            and self.temperature != 1
            and "SGLang tells log-probs of temperature 1 there; give rollout.temperature=1, or another top_k",
            f"vllm={self.vllm}": self.vllm != VllmConfig() and "SGLang does not read vLLM's options; leave them out",
        }
        for option, reason in refused.items():
            if reason:
                raise ConfigError(f"rollout.engine=sglang with rollout.{option}: {reason}")

    def _check_replay(self) -> None:
        refused = {
            "partial=true": self.partial and "tokens of a response would have routes of several weights",
            f"tensor_parallel_size={self.tensor_parallel_size}": self.tensor_parallel_size > 1
            and "routes are recorded in engines of one worker",
            "vllm.enforce_eager=false": self.vllm.enforce_eager is False
            and "routers tell their choices outside of compiled graphs alone",
        }
        for option, reason in refused.items():
            if reason:
                raise ConfigError(f"rollout.router_replay=true with rollout.{option}: {reason}; leave one of them out")

    def _check_steps_ahead(self) -> None:
        if self.partial != (self.max_tokens_per_step is not None):
            raise ConfigError(
                f"rollout.partial={self.partial} and rollout.max_tokens_per_step={self.max_tokens_per_step}: "
                "expected both or neither, as in rollout.partial=true rollout.max_tokens_per_step=512"
            )
        if self.max_tokens_per_step is not None:
            at_least("rollout", 1, max_tokens_per_step=self.max_tokens_per_step)
        allowed = self.max_staleness - (self.steps_per_response - 1)
        self.steps_ahead = allowed if self.steps_ahead is None else self.steps_ahead
        if not 0 <= self.steps_ahead <= allowed:
            raise ConfigError(
                f"rollout.max_staleness={self.max_staleness}: expected at least the steps ahead, "
                f"{max(self.steps_ahead, 0)} (rollout.steps_ahead), and {self.steps_per_response - 1} more for a "
                f"response of {self.steps_per_response} steps (rollout.max_response_length, "
                "rollout.max_tokens_per_step)"
            )


@dataclass(kw_only=True, slots=True)
class RewardsConfig:
    """``rewards``: the reward function, and the processes that call it."""

    function: str = "siirl_dask.rewards:exact_match"
    """Reward function, as ``module:function``, called as ``reward(prompt=, response=, answer=)`` for each row."""
    processes: int = 0
    """Processes on each worker that call the function; 0: the worker itself calls it."""
    timeout: float | None = None
    """Most seconds for one row. A function that is not async needs ``processes`` for a timeout."""
    concurrency: int = 64
    """Most concurrent calls of an async function on a worker."""
    max_failures: int = 0
    """Most rows of a step, over all workers, that may fail to be scored; the loss leaves them out."""

    def __post_init__(self) -> None:
        at_least("rewards", 0, processes=self.processes, max_failures=self.max_failures)
        at_least("rewards", 1, concurrency=self.concurrency)
        if self.timeout is not None:
            above("rewards", 0, timeout=self.timeout)
