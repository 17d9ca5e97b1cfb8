"""Estimates the seconds of a step, the idle time of each role, and which split of the workers would
be faster.

Nodes begin when their parents have ended and their workers are free, in the order of the DAG;
node_seconds.py estimates how long each takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from siirl_dask.config import Config, TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.estimates.computing_seconds import StepTokens
from siirl_dask.estimates.node_seconds import NodeSeconds, Placement, learns
from siirl_dask.estimates.role_moves import Moves
from siirl_dask.estimates.speeds import Speed
from siirl_dask.planner import Plan
from siirl_dask.schema import RESPONSE_IDS
from siirl_dask.training.specs import division_of


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


def step_time(config: Config, plan: Plan, speed: Speed, lengths: StepTokens) -> StepTime | None:
    """Return the seconds of a step of ``plan`` on such devices; None where a model of the plan
    is not known.
    """
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
        """Return a description of the split of so many ``workers``, for readers."""
        if self.together:
            return f"all {workers} do both"
        return f"{self.rollout} generate, {self.policy} learn"


def splits(config: Config, plan: Plan, speed: Speed, lengths: StepTokens) -> list[Split]:
    """Return the splits of the workers that the engine's and the shards' sizes allow, the
    fastest first.
    """
    return splits_by(
        config, plan, NodeSeconds(config, plan, speed, lengths).on, _overhead(plan, speed)
    )


def splits_by(
    config: Config,
    plan: Plan,
    seconds_on: Callable[[Placement], Mapping[str, float] | None],
    rest: float,
) -> list[Split]:
    """Return the same by other estimates.

    ``seconds_on`` returns the seconds of each node for a placement, None where it cannot know them;
    ``rest`` are the seconds of a step outside its nodes.
    """
    total = len(plan.chains)
    engine = _role_that(plan, RESPONSE_IDS)
    if engine is None:
        return []
    learning = {node.role for node in plan.dag.nodes if learns(node, plan)}
    workers = tuple(plan.chains)
    engine_workers = set(plan.placement[engine])
    with_engine = {engine}
    for role, placed in plan.placement.items():
        if role not in learning and not engine_workers.isdisjoint(placed):
            with_engine.add(role)
    found = []
    for rollout in range(1, total + 1):
        together = rollout == total
        policy = total if together else total - rollout
        if rollout % config.rollout.tensor_parallel_size or not _shards_fit(config.trainer, policy):
            continue
        placement: dict[str, Sequence[str]] = {}
        for role in plan.placement:
            placement[role] = workers[:rollout] if role in with_engine else workers[-policy:]
        seconds = seconds_on(placement)
        if seconds is not None:
            step = schedule(config, plan, seconds, placement, rest)
            found.append(Split(rollout, policy, together, step.seconds))
    return sorted(found, key=lambda split: split.seconds)


def _shards_fit(trainer: TrainerConfig, workers: int) -> bool:
    return not any(workers % size for size in division_of(trainer, workers).groups.values())


def _role_that(plan: Plan, column: str) -> str | None:
    return next(
        (node.role for node in plan.dag.nodes if column in node.contract.writes.names), None
    )


def _overhead(plan: Plan, speed: Speed) -> float:
    return speed.overhead * (1 + sum(edge.moves for edge in plan.edges))


def schedule(
    config: Config,
    plan: Plan,
    seconds: Mapping[str, float],
    placement: Mapping[str, Sequence[str]],
    rest: float,
) -> StepTime:
    """Return the step's time: each node begins when its parents have ended and its workers are
    free.

    ``rest`` are seconds of a step outside its nodes.
    """
    ends: dict[str, float] = {}
    free: dict[str, float] = dict.fromkeys(plan.chains, 0.0)
    busy: dict[str, float] = dict.fromkeys(plan.chains, 0.0)
    for node in plan.dag.ordered():
        workers = placement[node.role]
        own_seconds = seconds.get(node.name, 0.0)
        parents = () if node.lag else node.after  # a node with a lag reads rows of an earlier step
        begin = max([free[worker] for worker in workers] + [ends[parent] for parent in parents])
        end = begin + own_seconds
        ends[node.name] = end
        for worker in workers:
            free[worker] = end
            busy[worker] += own_seconds
    total = max((busy if config.rollout.steps_ahead else ends).values()) + rest
    computing = {node.role for node in plan.dag.nodes if node.name in seconds}
    idle: dict[str, float] = {}
    for role, workers in placement.items():
        if role in computing:
            idle[role] = 1 - max(busy[worker] for worker in workers) / total
    return StepTime(total, dict(seconds), idle)


def lengths_of(config: Config, text: str | None) -> StepTokens:
    """Return the lengths that ``--tokens 300,800`` names, means of prompts and responses; None: the
    longest allowed.

    ConfigError for another text, and for more than the configuration allows.
    """
    longest_prompt = config.data.max_prompt_length
    longest_response = config.rollout.max_response_length
    if text is None:
        return StepTokens(float(longest_prompt), float(longest_response), float(longest_response))
    match = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    prompt = 0
    response = 0
    if match is not None:
        prompt = int(match[1])
        response = int(match[2])
    if not prompt or not response:
        raise ConfigError(
            f"--tokens {text}: expected mean tokens of a prompt and of a response, such as 300,800"
        )
    if prompt > longest_prompt or response > longest_response:
        raise ConfigError(
            f"--tokens {text}: expected at most data.max_prompt_length={longest_prompt} and "
            f"rollout.max_response_length={longest_response}"
        )
    return StepTokens(float(prompt), float(response), float(longest_response))
