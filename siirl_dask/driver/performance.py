"""Estimates the seconds of a step, who waits for whom, and which split of the workers would be faster.

Nodes begin when their parents have ended and their workers are free, in the order of the DAG; node_seconds.py says how
long each takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from siirl_dask.config import Config, TrainerConfig
from siirl_dask.driver.node_seconds import Lengths, NodeSeconds, Placement, learns
from siirl_dask.driver.role_moves import Moves
from siirl_dask.driver.speeds import Speed
from siirl_dask.errors import ConfigError
from siirl_dask.planner import Plan
from siirl_dask.schema import RESPONSE_IDS


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimated seconds of a step."""

    seconds: float
    nodes: Mapping[str, float]
    """Seconds of each node that takes any, in the order of the DAG, without its moves."""
    idle: Mapping[str, float]
    """Share of a step in which the workers of a role compute nothing, by role."""
    moves: Moves = field(default_factory=dict)
    """Seconds for which memory of roles moves, by node and by what moves."""

    @property
    def bottleneck(self) -> str:
        """Name of the node that takes longest; empty where none takes any time."""
        return max(self.nodes, key=lambda name: self.nodes[name], default="")


def step_time(config: Config, plan: Plan, speed: Speed, lengths: Lengths) -> StepTime | None:
    """Return the seconds of a step of ``plan`` on such devices; None where a model of the plan is not known."""
    model = NodeSeconds(config, plan, speed, lengths)
    seconds = model.on(plan.placement)
    own = model.computing(plan.placement)
    if seconds is None or own is None:
        return None
    step = schedule(config, plan, seconds, plan.placement, _overhead(plan, speed))
    return replace(step, nodes=own, moves=model.moves(plan.placement))


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
    return splits_by(config, plan, NodeSeconds(config, plan, speed, lengths).on, _overhead(plan, speed))


def splits_by(
    config: Config, plan: Plan, seconds_on: Callable[[Placement], Mapping[str, float] | None], rest: float
) -> list[Split]:
    """Return the same by other seconds: ``seconds_on`` gives those of each node where roles are placed so, None where
    it does not know; ``rest`` are seconds of a step beside its nodes.
    """
    total = len(plan.chains)
    engine = _role_that(plan, RESPONSE_IDS)
    if engine is None:
        return []
    learn = {node.role for node in plan.dag.nodes if learns(node, plan)}
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
        if (seconds := seconds_on(placement)) is not None:
            step = schedule(config, plan, seconds, placement, rest)
            found.append(Split(rollout, policy, rollout == total, step.seconds))
    return sorted(found, key=lambda one: one.seconds)


def _shards_fit(trainer: TrainerConfig, workers: int) -> bool:
    sizes = (
        trainer.fsdp.shard_size or 1,
        trainer.fsdp.sequence_parallel,
        trainer.fsdp.tensor_parallel,
        trainer.megatron.ranks * trainer.megatron.linked_replicas,
    )
    return not any(workers % size for size in sizes)


def _role_that(plan: Plan, column: str) -> str | None:
    return next((node.role for node in plan.dag.nodes if column in node.contract.writes.names), None)


def _overhead(plan: Plan, speed: Speed) -> float:
    return speed.overhead * (1 + sum(edge.moves for edge in plan.edges))


def schedule(
    config: Config, plan: Plan, seconds: Mapping[str, float], placement: Mapping[str, Sequence[str]], rest: float
) -> StepTime:
    """Return the step's time: each node begins when its parents have ended and its workers are free.

    ``rest`` are seconds of a step beside its nodes.
    """
    ends: dict[str, float] = {}
    free: dict[str, float] = dict.fromkeys(plan.chains, 0.0)
    busy: dict[str, float] = dict.fromkeys(plan.chains, 0.0)
    for node in plan.dag.ordered():
        own, took = placement[node.role], seconds.get(node.name, 0.0)
        parents = () if node.lag else node.after  # what lags takes what an earlier step has left
        begin = max([free[worker] for worker in own] + [ends[parent] for parent in parents])
        ends[node.name] = begin + took
        for worker in own:
            free[worker], busy[worker] = begin + took, busy[worker] + took
    total = max((busy if config.rollout.steps_ahead else ends).values()) + rest
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
