"""A run's configuration: typed groups, filled from YAML and ``key=value`` overrides, refused before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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


class Way(StrEnum):
    """By which rows travel between two workers. ``auto`` finds out for each pair."""

    auto = "auto"
    """Shared memory between processes of one host, messages between others."""
    dask = "dask"
    """Messages over the cluster's own comms, always."""
    shm = "shm"
    """Shared memory, always: a pair that has none is an error."""


_UNITS = {
    "": 1,
    "B": 1,
    **{f"{k}B": 1000**n for n, k in enumerate("kMGT", 1)},
    **{f"{k}iB": 1024**n for n, k in enumerate("KMGT", 1)},
}


def parse_bytes(key: str, text: str) -> int:
    """Bytes of ``2GiB``, ``500 MB`` or ``1000000``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not found or found[2] not in _UNITS:
        raise ConfigError(f"{key}={text!r}: expected a number of bytes, such as 2GiB or 500MB")
    return int(float(found[1]) * _UNITS[found[2]])


def _at_least(group: str, least: float, **values: float) -> None:
    for name, value in values.items():
        if not value >= least:
            raise ConfigError(f"{group}.{name}={value!r}: expected at least {least}")


def _above(group: str, bound: float, **values: float) -> None:
    for name, value in values.items():
        if not value > bound:
            raise ConfigError(f"{group}.{name}={value!r}: expected more than {bound}")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str = "run"
    url: str = "runs/${run.name}"
    """Where everything the run makes is written: a local folder or any fsspec URL."""
    steps: int = 100
    seed: int = 0
    lookahead: int = 2
    """Steps submitted ahead, so that no worker waits for the client."""

    def __post_init__(self) -> None:
        _at_least("run", 1, steps=self.steps, lookahead=self.lookahead)
        _at_least("run", 0, seed=self.seed)
        if not self.url:
            raise ConfigError("run.url='': expected a folder or an fsspec URL")
        self.url = self.url.replace("${run.name}", self.name)  # a Config made in Python has no OmegaConf to do it


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    workers: int = 2
    """Processes started on this machine; of a cluster given by address, how many of its workers to take."""
    address: str | None = None
    """Scheduler address of an existing cluster, such as ``tcp://10.0.0.1:8786``."""
    scheduler_file: str | None = None
    """Scheduler file of an existing cluster."""
    placement: dict[str, list[int]] = field(default_factory=dict)
    """Workers of each role, by index; a role that is not named is on every worker."""
    threads: int = 1
    """Torch threads per worker."""
    memory_limit: str | None = None
    """Memory of one worker process, such as ``64GiB``: a run that is estimated to need more is refused. None is no
    limit.
    """
    start_timeout: float = 120.0
    """Seconds until every worker must be up and its roles built."""
    stall_timeout: float = 600.0
    """Seconds without progress after which a wait for a peer gives up and names it."""
    peer_timeout: float = 5.0
    """Seconds within which a peer that is dead or stands still is noticed by those that wait for it."""

    def __post_init__(self) -> None:
        _at_least("cluster", 1, workers=self.workers, threads=self.threads)
        _above("cluster", 0, start_timeout=self.start_timeout, stall_timeout=self.stall_timeout)
        _above("cluster", 0, peer_timeout=self.peer_timeout)
        if self.memory_limit is not None:
            parse_bytes("cluster.memory_limit", self.memory_limit)
        if self.address and self.scheduler_file:
            raise ConfigError("cluster.address and cluster.scheduler_file are both given: expected one of them")
        for role, workers in self.placement.items():
            if not workers or len(set(workers)) != len(workers):
                raise ConfigError(
                    f"cluster.placement.{role}={workers}: expected worker indices, each once, at least one"
                )
            if outside := [w for w in workers if not 0 <= w < self.workers]:
                raise ConfigError(
                    f"cluster.placement.{role}={workers}: no worker {outside[0]}; "
                    f"cluster.workers={self.workers} gives 0 to {self.workers - 1}"
                )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    url: str = "???"
    """A Parquet folder or file, or a table of siirl_storage, on any fsspec URL."""
    prepare: str | None = None
    """``module:function``, called with the Config before anything starts when there is nothing at ``data.url``."""
    batch_size: int = 32
    """Prompts per step, over all workers."""
    prompt: str = "prompt"
    """Column of the prompt; a dot goes into a struct."""
    answer: str = "answer"
    """Column of the answer; a dot goes into a struct, as in ``reward_model.ground_truth``."""
    max_prompt_length: int = 1024
    """Tokens. A longer prompt is dropped from its step, and counted."""
    transport: Way = Way.auto
    """How rows move between workers: ``auto``, ``dask`` or ``shm``."""
    memory_limit: str = "2GiB"
    """What a worker may use to move rows, beyond its own part and its result; partitions that wait beyond it spill."""
    spill_directory: str | None = None
    """Where they spill to: a folder on every worker's machine; where none is given, that for temporary files."""
    quadratic_from: int = 0
    """Tokens at which attention costs a row as much as everything else, about 6 x hidden size: rows are balanced by
    tokens + tokens^2 / quadratic_from. 0 balances by tokens alone.
    """

    def __post_init__(self) -> None:
        _at_least("data", 1, batch_size=self.batch_size, max_prompt_length=self.max_prompt_length)
        _at_least("data", 0, quadratic_from=self.quadratic_from)
        if parse_bytes("data.memory_limit", self.memory_limit) < 2**20:
            raise ConfigError(f"data.memory_limit={self.memory_limit!r}: expected at least 1MiB")


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
    max_rows: int = 256
    """Rows generated at once on a worker."""
    gpu_memory_utilization: float = 0.9
    """This and what follows is for vLLM. Share of an accelerator's memory that it takes, weights and caches, where
    ``kv_cache_memory`` is not given.
    """
    kv_cache_memory: str | None = None
    """Of the cache of keys and values on a worker, such as ``4GiB``; where none is given, 1GiB on a CPU."""
    max_num_seqs: int | None = None
    """Rows in a batch; none, ``max_rows``."""
    max_num_batched_tokens: int | None = None
    """Tokens in a batch; none, vLLM's own choice."""
    enforce_eager: bool | None = None
    """Without compiled graphs; none, so on a CPU only."""
    enable_prefix_caching: bool = True
    """Read a prompt once for all its samples."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of ``vllm.LLM``, such as ``{max_model_len: 4096}``."""

    @property
    def n_and_greedy(self) -> int:
        """Responses to each prompt where the most likely one is added to the samples."""
        return self.n + 1

    def __post_init__(self) -> None:
        _at_least("rollout", 1, n=self.n, max_response_length=self.max_response_length, max_rows=self.max_rows)
        _at_least("rollout", 0, top_k=self.top_k)
        _above("rollout", 0, temperature=self.temperature)
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
                _at_least("rollout", 1, **{name: given})
        if self.kv_cache_memory is not None and parse_bytes("rollout.kv_cache_memory", self.kv_cache_memory) < 2**20:
            raise ConfigError(f"rollout.kv_cache_memory={self.kv_cache_memory!r}: expected at least 1MiB")
        if self.engine_kwargs and self.engine is Engine.transformers:
            raise ConfigError(
                f"rollout.engine_kwargs={self.engine_kwargs}: they are vLLM's, and rollout.engine is transformers; "
                "leave them out or take rollout.engine=vllm"
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
        _at_least("rewards", 0, processes=self.processes, max_failures=self.max_failures)
        _at_least("rewards", 1, concurrency=self.concurrency)
        if self.timeout is not None:
            _above("rewards", 0, timeout=self.timeout)


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """Functions by name, ``module:function``, and their options by theirs; see docs/algorithms.md for what there is."""

    advantage: str = "siirl_dask.algorithms:grpo"
    """Of Outcomes, or where the DAG estimates advantages of tokens, of TokenOutcomes."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    loss: str = "siirl_dask.algorithms:ppo_clip"
    """Of LossInputs: the policy's loss, token by token."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Such as ``{clip_low: 0.2, clip_high: 0.28}``."""
    aggregation: str = "siirl_dask.algorithms:token_mean"
    """How tokens' losses become a mini-batch's."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    kl: str = "siirl_dask.algorithms:k3"
    """Estimate of KL(policy, reference) that ``kl_coefficient`` multiplies."""
    kl_coefficient: float = 0.0
    """In the loss; needs a node that writes ``reference_logprobs``."""
    entropy_coefficient: float = 0.0
    correction: str | None = None
    """Of LossInputs: weights of tokens that correct for a sampler that is not quite the policy; none, no correction."""
    correction_options: dict[str, Any] = field(default_factory=dict)
    minibatches: int = 1
    """Optimiser steps per step; prompts are drawn into mini-batches globally, with all their samples."""

    def __post_init__(self) -> None:
        _at_least("algorithm", 1, minibatches=self.minibatches)
        _at_least("algorithm", 0, kl_coefficient=self.kl_coefficient, entropy_coefficient=self.entropy_coefficient)
        if self.correction_options and self.correction is None:
            raise ConfigError("algorithm.correction_options are given without algorithm.correction")


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float = 1.0
    max_tokens_per_micro_batch: int = 16384
    """Tokens, prompt and response, that go through the model at once."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"trainer.lr={self.lr!r}: expected more than 0, and finite")
        _above("trainer", 0, max_grad_norm=self.max_grad_norm)
        _at_least("trainer", 0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        _at_least("trainer", 1, max_tokens_per_micro_batch=self.max_tokens_per_micro_batch)
        self.betas = tuple(self.betas)  # type: ignore[assignment]  # a list is fine as well
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"trainer.betas={self.betas}: expected two numbers from 0 to below 1")


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    url: str | None = None
    """Dataset of the validation nodes; none, no validation."""
    every: int = 10
    """Steps between validations; one is run before the first step and one after the last as well."""
    test_url: str | None = None
    """A dataset that is touched once, after the last step."""

    def __post_init__(self) -> None:
        _at_least("validation", 1, every=self.every)


@dataclass(kw_only=True, slots=True)
class ObserveConfig:
    progress: bool = True
    """A progress bar on the terminal."""
    tensorboard: bool = False
    """Write TensorBoard event files under the run's URL; needs the extra ``tensorboard``."""
    dashboard_port: int = 0
    """Port of the Dask dashboard of a cluster started here, on 127.0.0.1; 0 takes a free one."""

    def __post_init__(self) -> None:
        if not 0 <= self.dashboard_port < 65536:
            raise ConfigError(f"observe.dashboard_port={self.dashboard_port}: expected 0 to 65535")


@dataclass(kw_only=True, slots=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: TrainerConfig = field(default_factory=TrainerConfig)
    """How the critic learns, where the DAG has one."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        if self.algorithm.minibatches > self.data.batch_size:
            raise ConfigError(
                f"algorithm.minibatches={self.algorithm.minibatches}: expected at most data.batch_size="
                f"{self.data.batch_size}, one prompt each"
            )


Values = dict[str, Any]
