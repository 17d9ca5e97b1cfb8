"""Estimates the seconds of each node of a step, who waits for whom, and which split of the workers would be faster.

A node's work follows from its columns: one that writes responses generates, one that writes log-probs or values passes
forward over the rows, one that takes mini-batches to a trained role passes forward and backward, and weights travel
from the node that writes parameters to the one that reads them. Everything else counts as nothing. Nodes begin when
their parents have ended and their workers are free, in the order of the DAG.

    pass        2 FLOPs a parameter and token, and attention; three times that with gradients, four with recomputation
    generation  each step reads weights and cache once; prompts are read before, once for all samples with vLLM
    optimizer   reads and writes 40 bytes a parameter for each mini-batch
    collectives sums of gradients, gathers and scatters of fsdp, of which computing hides four fifths
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import Backend, Config, Dtype, Engine, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.driver.speeds import Speed
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import Architecture, read_architecture
from siirl_dask.models.shapes import ModelSize, count_parameters
from siirl_dask.planner import Node, Plan
from siirl_dask.planner.contract import options_of
from siirl_dask.rollout import choose_engine
from siirl_dask.schema import (
    MINIBATCH,
    OLD_LOGPROBS,
    PARAMETER_DATA,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    VALUES,
)

_SCORES = {OLD_LOGPROBS, REFERENCE_LOGPROBS, VALUES}
_OPTIMIZER = 40  # bytes: AdamW reads weights, gradients and moments and writes all but the gradients, which are zeroed
_HIDDEN_BY_COMPUTING = 0.8  # share of a collective's time
_SAMPLER = 60  # bytes read and written for each logit that a token is drawn from
_MODULES = 6  # times a bare operation's seconds that one takes within a model's Python; fitted on one machine
_OPERATIONS = {  # counted on torch 2.13 and transformers 5: for each layer, and beside the layers
    "step": (70, 80),
    "forward": (96, 107),
    "backward": (192, 167),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the rows of a step."""

    prompt: float
    response: float
    longest: float
    """Longest of the responses that are generated together: an engine goes on as long."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimated seconds of a step."""

    seconds: float
    nodes: Mapping[str, float]
    """Seconds of each node that takes any, in the order of the DAG."""
    idle: Mapping[str, float]
    """Share of a step in which the workers of a role compute nothing, by role."""

    @property
    def bottleneck(self) -> str:
        """Name of the node that takes longest; empty where none takes any time."""
        return max(self.nodes, key=lambda name: self.nodes[name], default="")


@dataclass(frozen=True, slots=True)
class _Model:
    """A role's model on its workers."""

    size: ModelSize
    one: Architecture
    narrow: int
    workers: int

    @property
    def layers(self) -> int:
        """Parameters of all layers, whose products take nearly all the time."""
        return max(1, self.size.total - self.one.vocabulary * self.one.hidden * (1 if self.one.tied else 2))

    @property
    def head(self) -> int:
        return self.one.vocabulary * self.one.hidden

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.one.layers * self.one.keys * self.narrow


def step_time(config: Config, plan: Plan, speed: Speed, lengths: Lengths) -> StepTime | None:
    """Return the seconds of a step of ``plan`` on such devices; None where a model of the plan is not known."""
    workers = {role: len(placed) for role, placed in plan.placement.items()}
    seconds = _all_seconds(config, plan, speed, lengths, workers)
    return None if seconds is None else _schedule(config, plan, speed, seconds, plan.placement)


@dataclass(frozen=True, slots=True)
class Split:
    """A split of the workers between generation and training."""

    rollout: int
    """Workers that generate."""
    policy: int
    """Workers that learn."""
    together: bool
    """Whether all workers do both."""
    seconds: float

    def text(self, workers: int) -> str:
        """Return it as a placement, for readers."""
        return f"all {workers} do both" if self.together else f"{self.rollout} generate, {self.policy} learn"


def splits(config: Config, plan: Plan, speed: Speed, lengths: Lengths) -> list[Split]:
    """Return the splits of the workers that the engine's and the shards' sizes allow, the fastest first."""
    total = len(plan.chains)
    engine = _role_that(plan, RESPONSE_IDS)
    if engine is None:
        return []
    learn = {node.role for node in plan.dag.nodes if _learns(node, plan)}
    found = []
    for rollout in [*range(1, total), total]:
        policy = total if rollout == total else total - rollout
        if rollout % config.rollout.tensor_parallel_size or not _shards_fit(config.trainer, policy):
            continue
        workers, placement = tuple(plan.chains), dict[str, Sequence[str]]()
        with_engine = {role for role, placed in plan.placement.items() if {*placed} & {*plan.placement[engine]}} - learn
        for role in plan.placement:
            first = role == engine or role in with_engine
            placement[role] = workers[:rollout] if first else workers[-policy:]
        counts = {role: len(placed) for role, placed in placement.items()}
        if (seconds := _all_seconds(config, plan, speed, lengths, counts)) is not None:
            step = _schedule(config, plan, speed, seconds, placement)
            found.append(Split(rollout, policy, rollout == total, step.seconds))
    return sorted(found, key=lambda one: one.seconds)


def _shards_fit(trainer: TrainerConfig, workers: int) -> bool:
    sizes = (trainer.fsdp.shard_size or 1, trainer.fsdp.sequence_parallel, trainer.fsdp.tensor_parallel)
    return not any(workers % size for size in sizes)


def _role_that(plan: Plan, column: str) -> str | None:
    return next((node.role for node in plan.dag.nodes if column in node.contract.writes.names), None)


def _learns(node: Node, plan: Plan) -> bool:
    return MINIBATCH in node.contract.reads and "trainer" in options_of(plan.dag.role(node.role).build)


def _all_seconds(
    config: Config, plan: Plan, speed: Speed, lengths: Lengths, workers: Mapping[str, int]
) -> dict[str, float] | None:
    """Return the seconds of each node that takes any, on so many workers of each role."""
    found: dict[str, float] = {}
    for node in plan.dag.nodes:
        options = options_of(plan.dag.role(node.role).build)
        writes, reads = set(node.contract.writes.names), set(node.contract.reads)
        heavy = RESPONSE_IDS in writes or writes & _SCORES or _learns(node, plan) or PARAMETER_DATA in writes | reads
        if not heavy:
            continue
        if (model := _model_of(options, config, workers[node.role])) is None:
            return None
        trainer: TrainerConfig = options.get("trainer", config.trainer)
        if RESPONSE_IDS in writes:
            seconds = _generation(model, options.get("rollout", config.rollout), config, speed, lengths)
        elif PARAMETER_DATA in writes | reads:
            seconds = _transfer(model, speed) / (2 if PARAMETER_DATA in reads else 1)
        elif _learns(node, plan):
            seconds = _update(model, trainer, config, speed, lengths)
        else:
            seconds = _scoring(model, trainer, config, speed, lengths)
        found[node.name] = seconds * _contention(speed, config, workers[node.role])
    return found


def _contention(speed: Speed, config: Config, workers: int) -> float:
    """Return how much longer it takes where a host's workers have fewer cores than threads."""
    return max(1.0, workers * config.cluster.threads / speed.cores) if speed.cores else 1.0


def _model_of(options: Mapping[str, Any], config: Config, workers: int) -> _Model | None:
    model: ModelConfig = options.get("model", config.model)
    size, one = count_parameters(model.path), read_architecture(model.path)
    if size is None or one is None:
        return None
    return _Model(size, one, 2 if model.dtype is Dtype.bfloat16 else 4, workers)


def _flops(model: _Model, speed: Speed) -> float:
    return speed.flops if model.narrow == 2 else speed.flops32  # bytes of bfloat16


def _rows(config: Config) -> int:
    return config.data.batch_size * config.rollout.n


def _forward_flops(model: _Model, tokens: float, length: float, responses: float) -> float:
    """Return the arithmetic of a forward pass: layers, causal attention over rows of a length, and the head."""
    attention = 2 * model.one.layers * model.one.queries * length  # half of the pairs, two products of 2 FLOPs
    return tokens * (2 * model.layers + attention) + 2 * model.head * responses


def _pass_bytes(model: _Model, tokens: float) -> float:
    """Return the bytes of activations that a forward pass writes and reads again."""
    one = model.one
    each = 24 * one.hidden + model.narrow * (2 * one.queries + 2 * one.keys + 4 * one.intermediate)
    return 2 * tokens * one.layers * each


def _operations(model: _Model, speed: Speed, kind: str) -> float:
    each, beside = _OPERATIONS[kind]
    return _MODULES * speed.operation * (each * model.one.layers + beside)


def _scoring(model: _Model, trainer: TrainerConfig, config: Config, speed: Speed, lengths: Lengths) -> float:
    tokens = _rows(config) * (lengths.prompt + lengths.response) / model.workers
    responses = tokens * lengths.response / (lengths.prompt + lengths.response)
    compute = _forward_flops(model, tokens, lengths.prompt + lengths.response, responses)
    passes = max(1.0, tokens / trainer.max_tokens_per_micro_batch)
    seconds = compute / (_flops(model, speed) * speed.training) + passes * _operations(model, speed, "forward")
    seconds += _pass_bytes(model, tokens) / speed.memory_rate if speed.cores else 0.0
    gathered = model.narrow * model.size.total if trainer.backend is Backend.fsdp else 0
    return _with_collectives(seconds, passes * gathered * _ring(model.workers) / speed.link)


def _update(model: _Model, trainer: TrainerConfig, config: Config, speed: Speed, lengths: Lengths) -> float:
    steps = config.algorithm.minibatches * config.algorithm.epochs
    tokens = _rows(config) * (lengths.prompt + lengths.response) / model.workers * config.algorithm.epochs
    responses = tokens * lengths.response / (lengths.prompt + lengths.response)
    times = 4 if trainer.gradient_checkpointing else 3
    compute = times * _forward_flops(model, tokens, lengths.prompt + lengths.response, responses)
    compute += 2 * model.head * responses  # logits are computed again in the backward pass
    passes = max(float(steps), tokens / trainer.max_tokens_per_micro_batch)
    operations = sum(_operations(model, speed, kind) for kind in ("forward", "backward"))
    seconds = compute / (_flops(model, speed) * speed.training) + passes * operations
    seconds += times * _pass_bytes(model, tokens) / speed.memory_rate if speed.cores else 0.0
    learned = model.size.total if not trainer.lora.rank else 0
    shards = 1 if trainer.backend is Backend.torch else trainer.fsdp.shard_size or model.workers
    seconds += steps * _OPTIMIZER * learned / shards / speed.memory_rate
    if trainer.backend is Backend.fsdp:
        moved = passes * ((times - 1) * model.narrow * model.size.total + 4 * learned)  # gathers, and the scatter
    else:
        moved = steps * 2 * 4 * learned
    return _with_collectives(seconds, moved * _ring(model.workers) / speed.link, hidden=trainer.backend is Backend.fsdp)


def _ring(workers: int) -> float:
    """Return the share of a tensor that each worker of a ring sends."""
    return (workers - 1) / workers


def _with_collectives(compute: float, moved: float, *, hidden: bool = True) -> float:
    return compute + (max(moved - _HIDDEN_BY_COMPUTING * compute, 0.2 * moved) if hidden else moved)


def _generation(model: _Model, rollout: RolloutConfig, config: Config, speed: Speed, lengths: Lengths) -> float:
    """Return the seconds of the slowest engine, in which a row takes the place of one that has ended."""
    vllm = choose_engine(rollout.engine) is Engine.vllm
    ranks = rollout.tensor_parallel_size
    rows = _rows(config) / (model.workers / ranks)
    slots = min(rows, _slots(model, rollout, speed, lengths))
    prompts = rows / rollout.n if vllm and rollout.vllm.enable_prefix_caching else rows
    flops, rate = ranks * _flops(model, speed), ranks * speed.memory_rate * speed.decoding
    read = prompts * lengths.prompt
    prefill = _forward_flops(model, read, lengths.prompt, rows) / (flops * speed.prefill)
    steps = max(lengths.longest, rows * lengths.response / slots)
    running = rows * lengths.response / steps
    weights = model.narrow * (model.layers + model.head)
    cache = running * (lengths.prompt + lengths.response / 2) * model.token_bytes * (1 if vllm else 3)  # and a copy
    reading = (weights + cache) / rate
    arithmetic = running * 2 * (model.layers + model.head) / (flops * speed.prefill)
    token = reading + arithmetic if speed.cores else max(reading, arithmetic)
    token += running * model.one.vocabulary * _SAMPLER / speed.memory_rate + speed.step
    return prefill + steps * (token + _operations(model, speed, "step"))


def _slots(model: _Model, rollout: RolloutConfig, speed: Speed, lengths: Lengths) -> float:
    """Return the rows that an engine generates at once."""
    ranks = rollout.tensor_parallel_size
    most = float(rollout.vllm.max_num_seqs or rollout.max_rows * ranks)
    if speed.cores:
        return most
    room = ranks * 0.85 * speed.memory - model.narrow * model.size.total
    return max(1.0, min(most, room / ((lengths.prompt + lengths.response) * model.token_bytes)))


def _transfer(model: _Model, speed: Speed) -> float:
    """Return the seconds in which new weights are gathered and sent, or taken and loaded."""
    return model.narrow * model.size.total / min(speed.link, speed.memory_rate / 3)


def _schedule(
    config: Config, plan: Plan, speed: Speed, seconds: Mapping[str, float], placement: Mapping[str, Sequence[str]]
) -> StepTime:
    """Return the step's time: each node begins when its parents have ended and its workers are free."""
    ends: dict[str, float] = {}
    free: dict[str, float] = dict.fromkeys(plan.chains, 0.0)
    busy: dict[str, float] = dict.fromkeys(plan.chains, 0.0)
    for node in plan.dag.nodes:
        own, took = placement[node.role], seconds.get(node.name, 0.0)
        parents = () if node.lag else node.after  # what lags takes what an earlier step has left
        begin = max([free[worker] for worker in own] + [ends[parent] for parent in parents])
        ends[node.name] = begin + took
        for worker in own:
            free[worker], busy[worker] = begin + took, busy[worker] + took
    edges = sum(edge.moves for edge in plan.edges)
    total = max((busy if config.rollout.steps_ahead else ends).values())
    total += speed.overhead * (1 + edges)
    computing = {node.role for node in plan.dag.nodes if node.name in seconds}
    idle = {
        role: 1 - max(busy[worker] for worker in placement[role]) / total for role in placement if role in computing
    }
    return StepTime(total, dict(seconds), idle)


def lengths_of(config: Config, text: str | None) -> Lengths:
    """Return the lengths that ``--tokens 300,800`` names, means of prompts and responses; None: the longest allowed.

    ConfigError for another text, and for more than the configuration allows.
    """
    longest = (config.data.max_prompt_length, config.rollout.max_response_length)
    if text is None:
        return Lengths(float(longest[0]), float(longest[1]), float(longest[1]))
    if not (match := re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)) or not all(map(int, match.groups())):
        raise ConfigError(f"--tokens {text}: expected mean tokens of a prompt and of a response, such as 300,800")
    prompt, response = map(int, match.groups())
    if prompt > longest[0] or response > longest[1]:
        raise ConfigError(
            f"--tokens {text}: expected at most data.max_prompt_length={longest[0]} and "
            f"rollout.max_response_length={longest[1]}"
        )
    return Lengths(float(prompt), float(response), float(longest[1]))
