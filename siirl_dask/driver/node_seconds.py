"""Seconds of each node of a step on a device, from parameters, tokens and the device's figures.

A node's work follows from its columns: one that writes responses generates, one that writes log-probs or values passes
forward over the rows, one that takes mini-batches to a trained role passes forward and backward, and weights travel
from the node that writes parameters to the one that reads them. Everything else counts as nothing.

    pass        2 FLOPs a parameter and token, and attention; three times that with gradients, two where adapters alone
                learn, and once more with recomputation; a prompt's rows on one worker, in one mini-batch, take it
                through all but attention once; of a mixture's experts those count that a token chooses
    generation  each step reads cache and weights once, of a mixture's experts those that any of its tokens chooses;
                prompts are read before, once for all samples
    optimizer   reads and writes 40 bytes a parameter for each mini-batch; adapters count as nothing
    weights     all, in the model's type, or the adapters alone, in float32
    collectives sums of gradients, gathers and scatters of fsdp, of which computing hides four fifths
    moves       what sleeps, wakes, parks and is reloaded: see role_moves.py; nothing on a CPU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from siirl_dask.config import Backend, Config, LoraConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.driver.role_moves import (
    Moves,
    ParkedModel,
    SleepingEngine,
    Work,
    WorkerMoves,
    messages_of,
    slowest,
)
from siirl_dask.driver.speeds import Speed
from siirl_dask.models.architecture import Architecture, read_architecture
from siirl_dask.models.shapes import ModelSize, count_parameters, read_widths
from siirl_dask.planner import Node, Plan
from siirl_dask.planner.contract import options_of
from siirl_dask.rollout.adapter_choice import takes_layers
from siirl_dask.rollout.memory import graphs_bytes
from siirl_dask.rollout.preflight import takes_vllm
from siirl_dask.schema import (
    MINIBATCH,
    OLD_LOGPROBS,
    PARAMETER_DATA,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    VALUES,
)
from siirl_dask.training.memory import ranks_of_replica
from siirl_dask.training.preflight import count_adapters

Placement = Mapping[str, Sequence[str]]
"""The workers of each role."""
_SCORES = {OLD_LOGPROBS, REFERENCE_LOGPROBS, VALUES}
_FLOAT32 = 4
_OPTIMIZER = 40  # bytes: AdamW reads weights, gradients and moments and writes all but the gradients, which are zeroed
_HIDDEN_BY_COMPUTING = 0.8  # share of a collective's time
_ENGINE_SHARE = 0.85  # of an accelerator's memory, for weights and cache
_SAMPLER = 40  # bytes read and written for each logit that a token is drawn from
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
class _Model:
    """A role's model on its workers."""

    size: ModelSize
    one: Architecture
    narrow: int
    workers: int
    experts: int
    """Experts of each layer of a mixture; 0 without."""

    @property
    def layers(self) -> int:
        """Parameters of all layers, whose products take nearly all the time."""
        return max(1, self.size.total - self.one.vocabulary * self.one.hidden * (1 if self.one.tied else 2))

    def needed(self, tokens: float = 1) -> float:
        """Return the parameters of the layers that so many tokens are computed with, which choose experts at random."""
        if not self.experts:
            return self.layers
        unused: float = (1 - self.one.chosen / self.experts) ** tokens
        return self.layers - self.size.experts * unused

    @property
    def head(self) -> int:
        return self.one.vocabulary * self.one.hidden

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.one.layers * self.one.keys * self.narrow


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens that one worker takes through a model in a step."""

    whole: float
    """Tokens of whole rows, as attention sees them."""
    computed: float
    """The same with each prompt once that rows share."""
    responses: float
    length: float
    """Tokens of a whole row."""


@dataclass(frozen=True, slots=True)
class NodeSeconds:
    """Estimates the nodes of a plan, on any number of workers."""

    config: Config
    plan: Plan
    speed: Speed
    lengths: Lengths
    _models: dict[str, tuple[ModelSize, Architecture, int] | None] = field(default_factory=dict)
    """Models that were read, by path."""

    def on(self, placement: Placement) -> dict[str, float] | None:
        """Return the seconds of each node that takes any where roles are placed so, with what moves; None where the
        size of a model is not known.
        """
        own = self.computing(placement)
        if own is None:
            return None
        moves = self.moves(placement)
        return {name: seconds + sum(moves.get(name, {}).values()) for name, seconds in own.items()}

    def computing(self, placement: Placement) -> dict[str, float] | None:
        """Return the same without what moves."""
        found: dict[str, float] = {}
        for node in self.plan.dag.ordered():
            writes, reads = set(node.contract.writes.names), set(node.contract.reads)
            learning = learns(node, self.plan)
            if not (_computes(node, self.plan) or PARAMETER_DATA in writes | reads):
                continue
            options = options_of(self.plan.dag.role(node.role).build)
            workers = len(placement[node.role])
            if (model := self._model(options.get("model", self.config.model), workers)) is None:
                return None
            seconds = self._seconds(node, model, options, learning=learning)
            found[node.name] = seconds * _contention(self.speed, self.config, workers)
        return found

    def moves(self, placement: Placement) -> Moves:
        """Return the seconds by node for which memory of the roles of a worker moves; nothing on a CPU."""
        if self.speed.cores:
            return {}
        roles_of: dict[str, frozenset[str]] = {}
        for role, workers in placement.items():
            for worker in workers:
                roles_of[worker] = roles_of.get(worker, frozenset()) | {role}
        return slowest(self._moves_of(roles, placement).seconds() for roles in set(roles_of.values()))

    def _moves_of(self, roles: frozenset[str], placement: Placement) -> WorkerMoves:
        """Return the moves of a worker with these roles."""
        nodes = [node for node in self.plan.dag.ordered() if node.role in roles]
        works = [Work(node, _computes(node, self.plan), learns(node, self.plan)) for node in nodes]
        generating = {node.role: node for node in nodes if RESPONSE_IDS in node.contract.writes.names}
        engines = [self._engine(node, placement, works) for node in generating.values()]
        models = [self._parked(role, placement, works) for role in dict.fromkeys(node.role for node in nodes)]
        total = len({worker for workers in placement.values() for worker in workers})
        return WorkerMoves(
            self.speed,
            total,
            works,
            [engine for engine in engines if engine is not None],
            [model for model in models if model is not None],
        )

    def _engine(self, node: Node, placement: Placement, works: Sequence[Work]) -> SleepingEngine | None:
        """Return the engine with which a node generates; None where it is no engine of vLLM's."""
        options = options_of(self.plan.dag.role(node.role).build)
        rollout: RolloutConfig = options.get("rollout", self.config.rollout)
        if not takes_vllm(rollout.engine):
            return None
        model = self._model(options.get("model", self.config.model), len(placement[node.role]))
        if model is None:
            return None
        level = rollout.vllm.sleep_level if len(_owners(works)) > 1 else 0
        weights = model.narrow * model.size.total / rollout.tensor_parallel_size
        loads = [work.node for work in works if PARAMETER_DATA in work.node.contract.reads]
        whole = any(self._weight_bytes(load, model, options) == model.narrow * model.size.total for load in loads)
        return SleepingEngine(
            role=node.role,
            weights=weights if level else 0.0,
            cache=max(0.0, _ENGINE_SHARE * self.speed.memory - weights) if level else 0.0,
            graphs=float(graphs_bytes(rollout)) if level else 0.0,
            forgets=level == 2 and whole,
            tensors=model.size.tensors if whole else 0,
        )

    def _parked(self, role: str, placement: Placement, works: Sequence[Work]) -> ParkedModel | None:
        """Return the model of a role that learns or scores; None for any other role."""
        options = options_of(self.plan.dag.role(role).build)
        trainer: TrainerConfig | None = options.get("trainer")
        if trainer is None:
            return None
        one: ModelConfig = options.get("model", self.config.model)
        model = self._model(one, len(placement[role]))
        if model is None:
            return None
        shards = ranks_of_replica(trainer, model.workers)
        trained = model.size.total
        if trainer.lora.rank:
            adapters = count_adapters(one.path, trainer)
            trained = trained if adapters is None else adapters.total
        learned = any(work.learns for work in works if work.node.role == role)
        each = 0
        if learned:
            each = 3 if trainer.keeps_average else 2
        gives = next((w.node for w in works if PARAMETER_DATA in w.node.contract.writes.names), None)
        gathered = self._weight_bytes(gives, model, options) if gives is not None and shards > 1 else 0
        return ParkedModel(
            role=role,
            weights=_FLOAT32 * model.size.total / shards,
            state=each * _FLOAT32 * trained / shards,
            parks=trainer.park and len(_owners(works)) > 1,
            messages=messages_of(gathered),
        )

    def _seconds(self, node: Node, model: _Model, options: Mapping[str, Any], *, learning: bool) -> float:
        config, speed, lengths = self.config, self.speed, self.lengths
        writes, reads = set(node.contract.writes.names), set(node.contract.reads)
        trainer: TrainerConfig = options.get("trainer", config.trainer)
        if RESPONSE_IDS in writes:
            return _generation(model, options.get("rollout", config.rollout), config, speed, lengths)
        if PARAMETER_DATA in writes | reads:
            seconds = self._weight_bytes(node, model, options) / min(speed.link, speed.memory_rate / 3)
            return seconds / 2 if PARAMETER_DATA in reads else seconds
        if learning:
            return _update(model, trainer, config, speed, lengths)
        return _scoring(model, trainer, config, speed, lengths)

    def _weight_bytes(self, node: Node, model: _Model, options: Mapping[str, Any]) -> int:
        """Return the bytes of new weights that are gathered and sent, or taken and loaded: an engine without layers for
        adapters merges them into all weights.
        """
        everything = model.narrow * model.size.total
        lora: LoraConfig | None = node.options.get("lora")
        if lora is None or not lora.rank:
            return everything
        one: ModelConfig = options.get("model", self.config.model)
        if PARAMETER_DATA in node.contract.reads:
            rollout: RolloutConfig = options.get("rollout", self.config.rollout)
            vllm = takes_vllm(rollout.engine)
            if not vllm or not takes_layers(one.dtype, rollout, lora, on_cpu=self.speed.cores > 0):
                return everything
        adapters = count_adapters(one.path, TrainerConfig(lora=lora))
        return everything if adapters is None else _FLOAT32 * adapters.total

    def _model(self, model: ModelConfig, workers: int) -> _Model | None:
        if model.path not in self._models:
            size, one, widths = count_parameters(model.path), read_architecture(model.path), read_widths(model.path)
            experts = widths.experts or 0 if widths and one and one.chosen else 0
            self._models[model.path] = None if size is None or one is None else (size, one, experts)
        if (found := self._models[model.path]) is None:
            return None
        size, one, experts = found
        return _Model(size, one, model.dtype.itemsize, workers, experts)


def _computes(node: Node, plan: Plan) -> bool:
    """Return whether a node generates, scores or learns."""
    writes = set(node.contract.writes.names)
    scores = writes & _SCORES and RESPONSE_IDS in node.contract.reads  # those that the engine has told take no pass
    return bool(scores) or RESPONSE_IDS in writes or learns(node, plan)


def _owners(works: Sequence[Work]) -> set[str]:
    """Return the roles that take turns on a worker's device."""
    return {work.node.role for work in works if work.computes}


def learns(node: Node, plan: Plan) -> bool:
    """Return whether a node trains its role's model."""
    return MINIBATCH in node.contract.reads and "trainer" in options_of(plan.dag.role(node.role).build)


def _contention(speed: Speed, config: Config, workers: int) -> float:
    """Return how much longer it takes where a host's workers have fewer cores than threads."""
    return max(1.0, workers * config.cluster.threads / speed.cores) if speed.cores else 1.0


def _flops(model: _Model, speed: Speed) -> float:
    return speed.flops if model.narrow == 2 else speed.flops32  # bytes of bfloat16


def _rows(config: Config) -> int:
    return config.data.batch_size * config.rollout.n


def _forward_flops(model: _Model, tokens: _Tokens) -> float:
    """Return the arithmetic of a forward pass: layers, causal attention within rows, and the head."""
    attention = 2 * model.one.layers * model.one.queries * tokens.length  # half of the pairs, two products of 2 FLOPs
    return 2 * model.needed() * tokens.computed + attention * tokens.whole + 2 * model.head * tokens.responses


def _pass_bytes(model: _Model, tokens: _Tokens) -> float:
    """Return the bytes of activations that a forward pass writes and reads again. Attention is of whole rows, to which
    prompts that they share are copied first.
    """
    one = model.one
    each = 24 * one.hidden + model.narrow * 4 * one.intermediate
    in_attention = model.narrow * 2 * (one.queries + one.keys)
    copies = 1 + (tokens.computed < tokens.whole)
    return 2 * one.layers * (tokens.computed * each + tokens.whole * in_attention * copies)


def _operations(model: _Model, speed: Speed, kind: str) -> float:
    each, beside = _OPERATIONS[kind]
    return _MODULES * speed.operation * (each * model.one.layers + beside)


def _tokens(
    model: _Model, trainer: TrainerConfig, config: Config, lengths: Lengths, *, epochs: int = 1, parts: int = 1
) -> _Tokens:
    """Count them. A prompt's samples are spread over the workers, and those of a worker over ``parts`` of its rows."""
    rows, length = epochs * _rows(config) / model.workers, lengths.prompt + lengths.response
    together = max(1.0, config.rollout.n / model.workers / parts)
    if trainer.backend is Backend.fsdp and trainer.fsdp.sequence_parallel > 1:
        together = 1.0
    computed = rows * (lengths.prompt / together + lengths.response)
    return _Tokens(rows * length, computed, rows * lengths.response, length)


def _scoring(model: _Model, trainer: TrainerConfig, config: Config, speed: Speed, lengths: Lengths) -> float:
    tokens = _tokens(model, trainer, config, lengths)
    compute = _forward_flops(model, tokens)
    passes = max(1.0, tokens.whole / trainer.max_tokens_per_micro_batch)
    seconds = compute / (_flops(model, speed) * speed.training) + passes * _operations(model, speed, "forward")
    seconds += _pass_bytes(model, tokens) / speed.memory_rate if speed.cores else 0.0
    gathered = model.narrow * model.size.total if trainer.backend is Backend.fsdp else 0
    return _with_collectives(seconds, passes * gathered * _ring(model.workers) / speed.link)


def _update(model: _Model, trainer: TrainerConfig, config: Config, speed: Speed, lengths: Lengths) -> float:
    steps = config.algorithm.minibatches * config.algorithm.epochs
    parts = config.algorithm.minibatches if config.algorithm.split_groups else 1
    tokens = _tokens(model, trainer, config, lengths, epochs=config.algorithm.epochs, parts=parts)
    times = (2 if trainer.lora.rank else 3) + trainer.gradient_checkpointing
    compute = times * _forward_flops(model, tokens)
    compute += 2 * model.head * tokens.responses  # logits are computed again in the backward pass
    passes = max(float(steps), tokens.whole / trainer.max_tokens_per_micro_batch)
    operations = sum(_operations(model, speed, kind) for kind in ("forward", "backward"))
    seconds = compute / (_flops(model, speed) * speed.training) + passes * operations
    seconds += times * _pass_bytes(model, tokens) / speed.memory_rate if speed.cores else 0.0
    learned = model.size.total if not trainer.lora.rank else 0
    shards = ranks_of_replica(trainer, model.workers)
    seconds += steps * _OPTIMIZER * learned / shards / speed.memory_rate
    if trainer.backend is Backend.fsdp:
        moved = passes * ((times - 1) * model.narrow * model.size.total + 4 * learned)  # gathers, and the scatter
    else:
        moved = (
            steps * 2 * 4 * learned / shards
        )  # with megatron the sums over replicas; those within one are not counted
    return _with_collectives(seconds, moved * _ring(model.workers) / speed.link, hidden=trainer.backend is Backend.fsdp)


def _ring(workers: int) -> float:
    """Return the share of a tensor that each worker of a ring sends."""
    return (workers - 1) / workers


def _with_collectives(compute: float, moved: float, *, hidden: bool = True) -> float:
    seen = max(moved - _HIDDEN_BY_COMPUTING * compute, (1 - _HIDDEN_BY_COMPUTING) * moved) if hidden else moved
    return compute + seen


def _generation(model: _Model, rollout: RolloutConfig, config: Config, speed: Speed, lengths: Lengths) -> float:
    """Return the seconds of the slowest engine, in which a row takes the place of one that has ended."""
    vllm = takes_vllm(rollout.engine)
    ranks = rollout.tensor_parallel_size
    rows = _rows(config) / (model.workers / ranks)
    slots = min(rows, _slots(model, rollout, speed, lengths))
    prompts = rows / rollout.n if rollout.vllm.enable_prefix_caching or not vllm else rows
    flops, rate = ranks * _flops(model, speed), ranks * speed.memory_rate * speed.decoding
    read = prompts * lengths.prompt
    prefill = _forward_flops(model, _Tokens(read, read, rows, lengths.prompt)) / (flops * speed.prefill)
    steps = max(lengths.longest, rows * lengths.response / slots)
    running = rows * lengths.response / steps
    weights = model.narrow * (model.needed(running) + model.head)
    cache = running * (lengths.prompt + lengths.response / 2) * model.token_bytes
    reading = (weights + cache) / rate
    arithmetic = running * 2 * (model.needed() + model.head) / (flops * speed.prefill)
    token = reading + arithmetic if speed.cores else max(reading, arithmetic)
    token += running * model.one.vocabulary * _SAMPLER / speed.memory_rate + speed.step
    return prefill + steps * (token + _operations(model, speed, "step"))


def _slots(model: _Model, rollout: RolloutConfig, speed: Speed, lengths: Lengths) -> float:
    """Return the rows that an engine generates at once."""
    ranks = rollout.tensor_parallel_size
    most = float(rollout.vllm.max_num_seqs or rollout.max_rows * ranks)
    if speed.cores:
        return most
    room = ranks * _ENGINE_SHARE * speed.memory - model.narrow * model.size.total
    return max(1.0, min(most, room / ((lengths.prompt + lengths.response) * model.token_bytes)))
