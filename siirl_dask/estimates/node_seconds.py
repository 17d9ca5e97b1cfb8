"""Seconds of each node of a step on a device, from parameters, tokens and the device's figures.

A node's work follows from its columns: a node that writes responses generates, one that writes log-probs or values runs
a forward pass over the rows, one that reads mini-batches for a trained role runs forward and backward passes, and
weights move from the node that writes parameters to the one that reads them. Everything else counts as nothing.

    pass        2 FLOPs a parameter and token, and attention; three times that with gradients, two where adapters alone
                learn, and once more with recomputation; a prompt's rows on one worker, in one mini-batch, take it
                through all but attention once; of a mixture's experts those count that a token chooses
    generation  each step reads cache and weights once, of a mixture's experts those that any of its tokens chooses;
                prompts are read before, once for all samples
    head        with model.float32_head its products are in float32, in an engine as well, but for one that only adds
                up in float32; and the engine reads it, widens it, and reads it again for each token
    optimizer   for each mini-batch: see optimizer_seconds.py; adapters count as nothing
    weights     all, in the model's type, or the adapters alone, in float32
    collectives sums of gradients, gathers and scatters of fsdp, of which computing hides four fifths
    moves       what sleeps, wakes, parks and is reloaded: see role_moves.py; nothing on a CPU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from siirl_dask.config import Config, LoraConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.estimates.computing_seconds import (
    ENGINE_SHARE,
    FLOAT32,
    ComputedModel,
    StepTokens,
    generation_seconds,
    scoring_seconds,
    update_seconds,
)
from siirl_dask.estimates.role_moves import (
    Moves,
    NodeWork,
    ParkedModel,
    SleepingEngine,
    WorkerMoves,
    messages_of,
    slowest,
)
from siirl_dask.estimates.speeds import Speed
from siirl_dask.models.architecture import Architecture, read_architecture
from siirl_dask.models.shapes import ModelSize, count_parameters, read_widths
from siirl_dask.planner import Node, Plan, options_of
from siirl_dask.rollout import engine_spec
from siirl_dask.schema import (
    MINIBATCH,
    OLD_LOGPROBS,
    PARAMETER_DATA,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    VALUES,
)
from siirl_dask.training.parts import matrix_shapes
from siirl_dask.training.preflight import count_adapters
from siirl_dask.training.specs import division_of

Placement = Mapping[str, Sequence[str]]
"""The workers of each role."""
_SCORES = {OLD_LOGPROBS, REFERENCE_LOGPROBS, VALUES}


@dataclass(frozen=True, slots=True)
class NodeSeconds:
    """Estimates the nodes of a plan, on any number of workers."""

    config: Config
    plan: Plan
    speed: Speed
    lengths: StepTokens
    _models: dict[str, tuple[ModelSize, Architecture, int] | None] = field(default_factory=dict)
    """Size, architecture and experts of models that were read, by path; None where they are not
    known."""

    def on(self, placement: Placement) -> dict[str, float] | None:
        """Return the seconds of each node that takes any for a placement of the roles, moves of
        memory included.

        None where the size of a model is not known.
        """
        own = self.computing(placement)
        if own is None:
            return None
        moves = self.moves(placement)
        return {name: seconds + sum(moves.get(name, {}).values()) for name, seconds in own.items()}

    def computing(self, placement: Placement) -> dict[str, float] | None:
        """Return the same without moves of memory."""
        found: dict[str, float] = {}
        for node in self.plan.dag.ordered():
            moves_weights = PARAMETER_DATA in (*node.contract.writes.names, *node.contract.reads)
            if not moves_weights and not _computes(node, self.plan):
                continue
            options = options_of(self.plan.dag.role(node.role).build)
            workers = len(placement[node.role])
            model = self._model(options.get("model", self.config.model), workers)
            if model is None:
                return None
            seconds = self._seconds(node, model, options)
            found[node.name] = seconds * _contention(self.speed, self.config, workers)
        return found

    def moves(self, placement: Placement) -> Moves:
        """Return the seconds by node for which memory of the roles of a worker moves; nothing on
        a CPU.
        """
        if self.speed.cores:
            return {}
        roles_of: dict[str, frozenset[str]] = {}
        for role, workers in placement.items():
            for worker in workers:
                roles_of[worker] = roles_of.get(worker, frozenset()) | {role}
        return slowest(
            self._moves_of(roles, placement).seconds() for roles in set(roles_of.values())
        )

    def _moves_of(self, roles: frozenset[str], placement: Placement) -> WorkerMoves:
        """Return the moves of a worker with these roles."""
        nodes = [node for node in self.plan.dag.ordered() if node.role in roles]
        works = []
        for node in nodes:
            works.append(NodeWork(node, _computes(node, self.plan), learns(node, self.plan)))
        generating: dict[str, Node] = {}
        for node in nodes:
            if RESPONSE_IDS in node.contract.writes.names:
                generating[node.role] = node
        engines = [self._engine(node, placement, works) for node in generating.values()]
        roles_in_order = dict.fromkeys(node.role for node in nodes)
        models = [self._parked(role, placement, works) for role in roles_in_order]
        all_workers = {worker for workers in placement.values() for worker in workers}
        return WorkerMoves(
            self.speed,
            len(all_workers),
            works,
            [engine for engine in engines if engine is not None],
            [model for model in models if model is not None],
        )

    def _engine(
        self,
        node: Node,
        placement: Placement,
        works: Sequence[NodeWork],
    ) -> SleepingEngine | None:
        """Return the engine with which a node generates; None where nothing is known of what it
        moves.
        """
        options = options_of(self.plan.dag.role(node.role).build)
        rollout: RolloutConfig = options.get("rollout", self.config.rollout)
        moves = engine_spec(rollout.engine).facts.moves(rollout)
        if moves is None:
            return None
        model = self._model(options.get("model", self.config.model), len(placement[node.role]))
        if model is None:
            return None
        weights = model.itemsize * model.size.total / rollout.tensor_parallel_size
        loads = [work.node for work in works if PARAMETER_DATA in work.node.contract.reads]
        whole = any(
            self._weight_bytes(load, model, options) == model.itemsize * model.size.total
            for load in loads
        )
        tensors = 0
        if whole:
            tensors = model.size.tensors
        if not moves.sleeps or len(_owners(works)) <= 1:
            return SleepingEngine(
                role=node.role, weights=0.0, cache=0.0, graphs=0.0, forgets=False, tensors=tensors
            )
        return SleepingEngine(
            role=node.role,
            weights=weights,
            cache=max(0.0, ENGINE_SHARE * self.speed.memory - weights),
            graphs=float(moves.graphs),
            forgets=moves.forgets and whole,
            tensors=tensors,
        )

    def _parked(
        self,
        role: str,
        placement: Placement,
        works: Sequence[NodeWork],
    ) -> ParkedModel | None:
        """Return the model of a role that learns or scores; None for any other role."""
        options = options_of(self.plan.dag.role(role).build)
        trainer: TrainerConfig | None = options.get("trainer")
        if trainer is None:
            return None
        model_config: ModelConfig = options.get("model", self.config.model)
        model = self._model(model_config, len(placement[role]))
        if model is None:
            return None
        shards = division_of(trainer, model.workers).shards
        trained = model.size.total
        if trainer.lora.rank:
            adapters = count_adapters(model_config.path, trainer)
            if adapters is not None:
                trained = adapters.total
        copies = 0  # of the trained parameters: moments, and an average
        if any(work.learns for work in works if work.node.role == role):
            copies = 2
            if trainer.keeps_average:
                copies = 3
        publisher = next(
            (work.node for work in works if PARAMETER_DATA in work.node.contract.writes.names), None
        )
        gathered = 0
        if publisher is not None and shards > 1:
            gathered = self._weight_bytes(publisher, model, options)
        return ParkedModel(
            role=role,
            weights=FLOAT32 * model.size.total / shards,
            state=copies * FLOAT32 * trained / shards,
            parks=trainer.park and len(_owners(works)) > 1,
            messages=messages_of(gathered),
        )

    def _seconds(self, node: Node, model: ComputedModel, options: Mapping[str, Any]) -> float:
        config = self.config
        speed = self.speed
        lengths = self.lengths
        writes = set(node.contract.writes.names)
        reads = set(node.contract.reads)
        trainer: TrainerConfig = options.get("trainer", config.trainer)
        if RESPONSE_IDS in writes:
            return generation_seconds(
                model, options.get("rollout", config.rollout), config, speed, lengths
            )
        if PARAMETER_DATA in writes | reads:
            seconds = self._weight_bytes(node, model, options) / min(
                speed.link, speed.memory_rate / 3
            )
            if PARAMETER_DATA in reads:
                return seconds / 2
            return seconds
        if learns(node, self.plan):
            path = options.get("model", config.model).path
            matrices = matrix_shapes(path, trainer, options.get("images"))
            return update_seconds(model, trainer, config, speed, lengths, matrices=matrices)
        return scoring_seconds(model, trainer, config, speed, lengths)

    def _weight_bytes(self, node: Node, model: ComputedModel, options: Mapping[str, Any]) -> int:
        """Return the bytes of new weights that a node gathers and sends, or receives and loads.

        An engine without layers for adapters merges them into all weights.
        """
        everything = model.itemsize * model.size.total
        lora: LoraConfig | None = node.options.get("lora")
        if lora is None or not lora.rank:
            return everything
        model_config: ModelConfig = options.get("model", self.config.model)
        if PARAMETER_DATA in node.contract.reads:
            rollout: RolloutConfig = options.get("rollout", self.config.rollout)
            has_layers = engine_spec(rollout.engine).facts.adapter_layers
            if not has_layers(model_config.dtype, rollout, lora, on_cpu=self.speed.cores > 0):
                return everything
        adapters = count_adapters(model_config.path, TrainerConfig(lora=lora))
        if adapters is None:
            return everything
        return FLOAT32 * adapters.total

    def _model(self, model: ModelConfig, workers: int) -> ComputedModel | None:
        if model.path not in self._models:
            self._models[model.path] = _read_model(model.path)
        found = self._models[model.path]
        if found is None:
            return None
        size, architecture, experts = found
        itemsize = model.dtype.itemsize
        return ComputedModel(
            size=size,
            architecture=architecture,
            itemsize=itemsize,
            workers=workers,
            experts=experts,
            wide_head=model.float32_head and itemsize < FLOAT32,
        )


def _read_model(path: str) -> tuple[ModelSize, Architecture, int] | None:
    """Return a model's size, architecture and experts of each layer; None where they are not
    known.
    """
    size = count_parameters(path)
    architecture = read_architecture(path)
    widths = read_widths(path)
    if size is None or architecture is None:
        return None
    experts = 0
    if widths and widths.experts and architecture.chosen:
        experts = widths.experts
    return size, architecture, experts


def _computes(node: Node, plan: Plan) -> bool:
    """Return whether a node generates, scores or learns."""
    writes = set(node.contract.writes.names)
    if RESPONSE_IDS in writes or learns(node, plan):
        return True
    if writes.isdisjoint(_SCORES):
        return False
    # log-probs that the engine has reported need no pass
    return RESPONSE_IDS in node.contract.reads


def _owners(works: Sequence[NodeWork]) -> set[str]:
    """Return the roles that use a worker's device one after the other."""
    return {work.node.role for work in works if work.computes}


def learns(node: Node, plan: Plan) -> bool:
    """Return whether a node trains its role's model."""
    if MINIBATCH not in node.contract.reads:
        return False
    return "trainer" in options_of(plan.dag.role(node.role).build)


def _contention(speed: Speed, config: Config, workers: int) -> float:
    """Return the factor by which work takes longer if a host's workers have fewer cores than
    threads.
    """
    if not speed.cores:
        return 1.0
    return max(1.0, workers * config.cluster.threads / speed.cores)
