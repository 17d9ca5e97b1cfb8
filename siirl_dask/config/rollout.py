"""Config groups of generation: sampling and rewards."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from siirl_dask.config.checks import above, at_least, finite, parse_bytes
from siirl_dask.config.engines import (
    Engine,
    Sampler,
    ServerConfig,
    SglangConfig,
    VllmConfig,
    changed_options,
)
from siirl_dask.errors import ConfigError, did_you_mean


class WeightSync(StrEnum):
    """Transfer of the policy's new weights to the engines; see docs/engines.md."""

    auto = "auto"
    """A broadcast if its backend is nccl or hccl, else rows."""
    rows = "rows"
    """Rows of the data plane, through the host's memory."""
    broadcast = "broadcast"
    """A broadcast from the device of one policy worker to the engines' devices; a run that
    cannot do so is refused."""


class PromptPlacement(StrEnum):
    """Choice of the rollout worker that samples a prompt."""

    anywhere = "anywhere"
    """The worker that loaded it."""
    balanced = "balanced"
    """Prompts with the longest expected responses first, each to the least loaded worker."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """``rollout``: sampling of responses, and the engine that generates them."""

    engine: str = "auto"
    """Engine that generates: ``vllm``, ``sglang``, ``transformers``; ``server``, for servers that
    are there already; ``auto``, which is vLLM if it is installed, else transformers; or
    ``module:NAME`` or ``file.py:NAME`` of an ``EngineSpec`` of your own."""
    process: bool = False
    """Run the engine, or each of its ranks, in a process of its own, which its worker starts and
    owns: what ends that process does not end the worker, which starts another and asks it again.
    Samples do not change."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Options of an engine of your own, as its spec describes them, such as ``{rows: 8}``."""
    n: int = 8
    """Samples per prompt, which form the group that an advantage compares."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens that may be drawn; 0: all."""
    min_p: float = 0.0
    """Least probability of a token that may be drawn, as a share of the likeliest token's; 0:
    any."""
    sampler: Sampler = Sampler.exact
    """``exact``: a sample depends on its prompt, its seed and the weights alone, with any engine
    and any layout of the run. ``vllm``: vLLM's own sampler, with a seed for each row. ``sglang``:
    SGLang's own, which its engine needs."""
    max_response_length: int = 256
    """Longest response, in tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, besides those of the model and its tokenizer."""
    max_rows: int = 256
    """Most rows generated at once on a worker."""
    max_staleness: int = 0
    """Steps by which the weights that sample may be older than those that are trained, so that
    generation runs ahead. Above 0 the nodes that generate need workers of their own, and
    ``algorithm.correction`` defaults to truncated_is."""
    partial: bool = False
    """Generate long responses over several steps: a response stops after ``max_tokens_per_step``
    tokens and goes on in the next step, with that step's weights. Its group is trained once it is
    complete; ``max_staleness`` must allow for these steps."""
    max_tokens_per_step: int | None = None
    """Most tokens of a response that are generated in one step, with ``partial``."""
    steps_ahead: int | None = None
    """Steps generated ahead of training. None: what ``max_staleness`` leaves after the steps of
    partial responses, or after one step for ``window``."""
    in_flight: bool = False
    """Load new weights while rows are generated, as soon as they are on a worker: rows under way go
    on with them. ``max_staleness`` bounds the age of a row's first token. Which weights sampled a
    token depends on time then; ``token_versions`` has it."""
    window: int = 0
    """Prompts, over all workers, whose responses or episodes a step may leave to the next one: it
    takes the first groups that are whole, and the others go on then, with environments that stay
    open. A group that would be older than ``max_staleness`` then is dropped, and begins again. 0: a
    step waits for all."""
    ledger: str | None = None
    """Table of samples of another run with ``window``, such as ``runs/first/rollouts``, whose
    choice of groups is repeated step by step; the clock decides nothing."""
    weight_bucket: str = "256MiB"
    """Largest piece of the policy's new weights that is on its way to the engines at once; a larger
    parameter travels alone."""
    weight_sync: WeightSync = WeightSync.auto
    """Transfer of new weights to the engines: ``auto``, ``rows`` or ``broadcast``. ``auto``
    broadcasts from device to device if policy and engines have workers of their own, each with an
    accelerator, and else sends rows."""
    expected_length_column: str | None = None
    """Dataset column with the expected number of tokens of a response; a dot leads into a struct.
    Workers share the prompts by it and begin with the longest; samples do not depend on it."""
    prompt_placement: PromptPlacement | None = None
    """Choice of the rollout worker that samples a prompt: ``anywhere``, the worker that loaded it;
    ``balanced``, the least loaded worker, longest prompts first. None: ``balanced`` with
    ``expected_length_column``, else ``anywhere``."""
    work_stealing: bool | None = None
    """Let a worker that has nothing left to begin take over rows that wait at others, beyond their
    ``max_rows``. None: on, as runs of before have recorded it."""
    router_replay: bool = False
    """Record the experts that each token goes to in the engine, and let the policy replay them (R3,
    arXiv:2510.11370)."""
    draft_tokens: int = 0
    """Most tokens of a response that are drafted before a pass of the model, as they came after the
    same tokens in the prompt or in other responses to it. Those that the engine would draw are
    taken together: in float32 samples do not change, and log-probs in their last bits. 0: none
    are drafted."""
    tensor_parallel_size: int = 1
    """Number of consecutive workers of the role that form one vLLM engine, each with a slice of
    the model."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Options that only vLLM reads."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    """Options that only SGLang reads."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Servers that generate, for ``engine: server``."""

    @property
    def n_and_greedy(self) -> int:
        """Responses to each prompt if the most likely one is added to the samples."""
        return self.n + 1

    @property
    def rows_per_prompt(self) -> int:
        """Most rows of a step per prompt, counting partial responses, and groups of ``window``, of
        earlier steps that end in it.
        """
        return self.n * (2 if self.window else self.steps_per_response)

    @property
    def continues_rows(self) -> bool:
        """Whether responses and episodes may go on in the next step."""
        if self.partial:
            return True
        return self.window > 0

    @property
    def steps_per_response(self) -> int:
        """Most steps over which one response is generated."""
        if self.max_tokens_per_step:
            return -(-self.max_response_length // self.max_tokens_per_step)
        return 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of the engine's cache of keys and values, as ``vllm.kv_cache_memory`` gives
        them; 0: not given.
        """
        size = self.vllm.kv_cache_memory
        if size:
            return parse_bytes("rollout.vllm.kv_cache_memory", size)
        return 0

    def __post_init__(self) -> None:
        at_least(
            "rollout",
            1,
            n=self.n,
            max_response_length=self.max_response_length,
            max_rows=self.max_rows,
        )
        at_least("rollout", 1, tensor_parallel_size=self.tensor_parallel_size)
        at_least(
            "rollout",
            0,
            top_k=self.top_k,
            max_staleness=self.max_staleness,
            draft_tokens=self.draft_tokens,
            window=self.window,
        )
        above("rollout", 0, temperature=self.temperature)
        finite("rollout", temperature=self.temperature)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p={self.top_p}: expected more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"rollout.min_p={self.min_p}: expected 0 to 1")
        negative = [token for token in self.stop_token_ids if token < 0]
        if negative:
            raise ConfigError(
                f"rollout.stop_token_ids={self.stop_token_ids}: {negative[0]} is no token; "
                "expected ids from 0"
            )
        if parse_bytes("rollout.weight_bucket", self.weight_bucket) < 1:
            raise ConfigError(
                f"rollout.weight_bucket={self.weight_bucket!r}: expected at least 1 byte"
            )
        if self.prompt_placement is None:
            known = self.expected_length_column is not None
            self.prompt_placement = PromptPlacement.balanced if known else PromptPlacement.anywhere
        self._check_steps_ahead()
        self._check_engine()
        if self.router_replay:
            self._check_replay()
        if self.in_flight:
            self._check_in_flight()

    def _check_in_flight(self) -> None:
        if not self.steps_ahead:
            raise ConfigError(
                f"rollout.in_flight=true with rollout.max_staleness={self.max_staleness} and "
                f"rollout.steps_ahead={self.steps_ahead}: new weights arrive while rows are "
                "generated only where steps are generated ahead; give rollout.max_staleness=1 or "
                "more, and the engines workers of their own"
            )
        refused = {
            "router_replay=true": self.router_replay
            and "tokens of a response would have routes of several weights",
            f"sampler={self.sampler}": self.sampler is not Sampler.exact
            and "a row that goes on with new weights must draw as one that was continued",
            "weight_sync=broadcast": self.weight_sync is WeightSync.broadcast
            and "each worker takes weights at a time of its own",
        }
        for option, reason in refused.items():
            if reason:
                raise ConfigError(
                    f"rollout.in_flight=true with rollout.{option}: {reason}; leave one of them out"
                )

    def _check_engine(self) -> None:
        self.engine = str(self.engine)
        if self.engine in list(Engine):
            if self.engine_options:
                raise ConfigError(
                    f"rollout.engine_options={self.engine_options}: they are for an engine of your "
                    f"own, and rollout.engine is {self.engine}, which reads rollout.vllm or "
                    "rollout.sglang; leave them out, or give rollout.engine=module:NAME"
                )
        else:
            self._check_own_engine()
        size = self.tensor_parallel_size
        self._check_sglang()
        self._check_server()
        if self.engine != Engine.transformers:
            return
        if size > 1:
            raise ConfigError(
                f"rollout.tensor_parallel_size={size}: rollout.engine=transformers generates on "
                "one device; take rollout.engine=vllm, or leave it at 1"
            )
        if self.sampler is Sampler.vllm:
            raise ConfigError(
                "rollout.sampler=vllm: it is part of vLLM, and rollout.engine is transformers; "
                "take rollout.sampler=exact or rollout.engine=vllm"
            )
        if self.vllm.engine_kwargs:
            raise ConfigError(
                f"rollout.vllm.engine_kwargs={self.vllm.engine_kwargs}: they are vLLM's, and "
                "rollout.engine is transformers; leave them out or take rollout.engine=vllm"
            )

    def _check_own_engine(self) -> None:
        """Raise ConfigError for a name that is no engine's, and for options of vLLM with an
        engine of the user's.
        """
        if not re.fullmatch(r".+:\w+", self.engine):
            shipped = [str(engine) for engine in Engine]
            raise ConfigError(
                f"rollout.engine={self.engine!r}: expected one of {shipped}, or module:NAME of an "
                f"engine of your own{did_you_mean(self.engine, shipped)}"
            )
        if self.sampler is Sampler.vllm:
            raise ConfigError(
                f"rollout.sampler=vllm: it is part of vLLM, and rollout.engine is {self.engine}; "
                "take rollout.sampler=exact or rollout.engine=vllm"
            )
        others = changed_options("rollout.vllm", self.vllm)
        if others:
            shown = ", ".join(f"{name}={value}" for name, value in others.items())
            raise ConfigError(
                f"{shown}: only vLLM reads this, and rollout.engine is {self.engine}; leave it out "
                "or take rollout.engine=vllm"
            )

    def _check_sglang(self) -> None:
        """Raise ConfigError for SGLang's options with another engine, and for what its engine
        cannot do.
        """
        used = self.engine == Engine.sglang
        if self.sampler is Sampler.sglang:
            self._check_sampler_of_sglang()
        others = (
            changed_options("rollout.vllm", self.vllm)
            if used
            else changed_options("rollout.sglang", self.sglang)
        )
        if others:
            shown = ", ".join(f"{name}={value}" for name, value in others.items())
            reader = "SGLang"
            if used:
                reader = "vLLM"
            raise ConfigError(
                f"{shown}: only {reader} reads this, and rollout.engine is {self.engine}; leave it "
                f"out or take rollout.engine={reader.lower()}"
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
        }
        for option, reason in refused.items():
            if reason:
                raise ConfigError(f"rollout.engine=sglang with rollout.{option}: {reason}")

    def _check_sampler_of_sglang(self) -> None:
        """Raise ConfigError for SGLang's sampler with another engine, and for what it cannot do."""
        if self.engine not in (Engine.sglang, Engine.server):
            raise ConfigError(
                "rollout.sampler=sglang: it is part of SGLang, and rollout.engine is "
                f"{self.engine}; take rollout.sampler=exact, or rollout.engine=sglang or server"
            )
        if self.min_p > 0:
            raise ConfigError(
                f"rollout.sampler=sglang with rollout.min_p={self.min_p}: SGLang's sampler does "
                "not take it together with seeds; leave it at 0, or take another engine"
            )
        if self.top_k == 1 and self.temperature != 1:
            raise ConfigError(
                "rollout.sampler=sglang with rollout.top_k=1 and "
                f"rollout.temperature={self.temperature}: SGLang tells log-probs of temperature 1 "
                "there; give rollout.temperature=1, or another top_k"
            )

    def _check_server(self) -> None:
        """Raise ConfigError for options of servers with another engine, and for what servers lack
        or cannot do.
        """
        others = changed_options("rollout.server", self.server)
        if self.engine != Engine.server:
            if others:
                shown = ", ".join(f"{name}={value}" for name, value in others.items())
                raise ConfigError(
                    f"{shown}: servers alone read this, and rollout.engine is {self.engine}; give "
                    "rollout.engine=server, or leave it out"
                )
            return
        if not self.server.urls:
            raise ConfigError(
                "rollout.engine=server: rollout.server.urls is empty; expected the servers' "
                "addresses, as in rollout.server.urls=[http://10.0.0.7:8000]"
            )
        if self.server.weights_folder is None:
            raise ConfigError(
                "rollout.engine=server: rollout.server.weights_folder is not set; expected a folder "
                "that workers and servers see under the same path, through which new weights go"
            )
        unread = changed_options("rollout.vllm", self.vllm)
        if unread:
            shown = ", ".join(f"{name}={value}" for name, value in unread.items())
            raise ConfigError(
                f"{shown}: rollout.engine=server does not start vLLM; give it to the server's own "
                "command line, and leave it out here"
            )

    def _check_replay(self) -> None:
        refused = {
            "partial=true": self.partial
            and "tokens of a response would have routes of several weights",
            f"window={self.window}": self.window > 0
            and "tokens of a response would have routes of several weights",
            f"draft_tokens={self.draft_tokens}": self.draft_tokens > 0
            and "routes are recorded a token at a time",
            "vllm.enforce_eager=false": self.vllm.enforce_eager is False
            and "routers tell their choices outside of compiled graphs alone",
        }
        for option, reason in refused.items():
            if reason:
                raise ConfigError(
                    f"rollout.router_replay=true with rollout.{option}: {reason}; leave one of "
                    "them out"
                )

    def _check_steps_ahead(self) -> None:
        if self.partial != (self.max_tokens_per_step is not None):
            raise ConfigError(
                f"rollout.partial={self.partial} and "
                f"rollout.max_tokens_per_step={self.max_tokens_per_step}: expected both or "
                "neither, as in rollout.partial=true rollout.max_tokens_per_step=512"
            )
        if self.max_tokens_per_step is not None:
            at_least("rollout", 1, max_tokens_per_step=self.max_tokens_per_step)
        later_steps = 1
        if not self.window:
            later_steps = self.steps_per_response - 1
        allowed = self.max_staleness - later_steps
        self.steps_ahead = allowed if self.steps_ahead is None else self.steps_ahead
        if not 0 <= self.steps_ahead <= allowed:
            raise ConfigError(
                f"rollout.max_staleness={self.max_staleness}: expected at least the steps ahead, "
                f"{max(self.steps_ahead, 0)} (rollout.steps_ahead), and {later_steps} more for a "
                f"response of {later_steps + 1} steps (rollout.window, or "
                "rollout.max_response_length and rollout.max_tokens_per_step)"
            )


@dataclass(kw_only=True, slots=True)
class RewardsConfig:
    """``rewards``: the reward function, and the processes that call it."""

    function: str = "siirl_dask.rewards:exact_match"
    """Reward function, as ``module:function``, called as ``reward(prompt=, response=, answer=)``
    for each row."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the function by name, such as ``{pattern: ...}`` of ``matches_format``."""
    processes: int = 0
    """Processes on each worker that call the function; 0: the worker itself calls it."""
    timeout: float | None = None
    """Most seconds for one row. A function that is not async needs ``processes`` for a timeout."""
    concurrency: int = 64
    """Most concurrent calls of an async function on a worker."""
    max_failures: int = 0
    """Most rows of a step, over all workers, that may fail to be scored; the loss leaves them
    out."""

    def __post_init__(self) -> None:
        at_least("rewards", 0, processes=self.processes, max_failures=self.max_failures)
        at_least("rewards", 1, concurrency=self.concurrency)
        if self.timeout is not None:
            above("rewards", 0, timeout=self.timeout)
