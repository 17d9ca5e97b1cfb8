"""Config group of several agents: each has the groups ``model``, ``rollout``, ``trainer`` and
``algorithm`` of its own.

What an agent does not say is the run's: ``config/file`` fills it in, so that an AgentConfig is
always whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

from siirl_dask.config.engines import Engine
from siirl_dask.config.model import ModelConfig
from siirl_dask.config.rollout import RolloutConfig
from siirl_dask.config.training import AlgorithmConfig, LoraConfig, TrainerConfig
from siirl_dask.errors import ConfigError, did_you_mean

SAMPLING = ("n", "temperature", "top_p", "top_k", "min_p", "max_response_length", "stop_token_ids")
"""Keys of ``rollout`` that belong to a turn, and not to the engine: agents that share one may
differ in them."""
RUN_WIDE = (
    "max_staleness",
    "steps_ahead",
    "partial",
    "max_tokens_per_step",
    "window",
    "ledger",
    "weight_bucket",
    "weight_sync",
    "expected_length_column",
    "prompt_placement",
    "work_stealing",
)
"""Keys of ``rollout`` that are the run's: no agent has its own."""
OPTIMIZING = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "warmup_steps",
    "schedule",
    "total_steps",
    "min_lr_ratio",
    "max_grad_norm",
    "max_skipped_steps",
    "ema_decay",
    "ema_every",
)
"""Keys of ``trainer`` that belong to an optimizer, and not to the network: agents over one base
may differ in them."""


@dataclass(kw_only=True, slots=True)
class AgentConfig:
    """``agents.NAME``: an agent. Each of its groups is the run's, with the agent's keys over it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How its turns are sampled. ``n`` is 1 for all agents but the first, unless it is given: a
    turn of each row."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    share: str | None = None
    """Agent, named before, whose engine, policy and optimizer it shares: both learn one set of
    weights."""
    base: list[str] = field(default_factory=list)
    """Agent, named before, over whose frozen weights its adapters lie (``base: a``). Once it is
    read: all agents over these weights, itself included, in order."""


def check_agents(
    agents: Mapping[str, AgentConfig], rollout: RolloutConfig, batch_size: int
) -> None:
    """Raise ConfigError for a name that columns cannot have, for keys that have no effect, and
    for a wrong share.
    """
    for name, agent in agents.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", name):
            raise ConfigError(
                f"agents.{name}: expected a name of letters and digits, as in 'solver'"
            )
        for key in RUN_WIDE:
            if getattr(agent.rollout, key) != getattr(rollout, key):
                raise ConfigError(
                    f"agents.{name}.rollout.{key}: it is one for the whole run; set rollout.{key}"
                )
        if agent.rollout.router_replay:
            raise ConfigError(
                f"agents.{name}.rollout.router_replay=true: an agent's turn goes on to the next "
                "agent without its routes; leave rollout.router_replay out"
            )
        if agent.algorithm.minibatches > batch_size:
            raise ConfigError(
                f"agents.{name}.algorithm.minibatches={agent.algorithm.minibatches}: expected at "
                f"most data.batch_size={batch_size}, one prompt each"
            )
        if agent.share is not None:
            _check_share(agents, name, agent)
        if agent.base:
            _check_base(agents, name, agent)
    _check_servers(agents)


def _check_servers(agents: Mapping[str, AgentConfig]) -> None:
    """Raise ConfigError for agents with weights of their own that have a server in common: it
    has those of one.
    """
    users: dict[tuple[str | None, int], str] = {}
    for name, agent in agents.items():
        if agent.rollout.engine != Engine.server:
            continue
        if agent.share is not None:
            continue
        if agent.base[:1] not in ([], [name]):  # it generates with another's engine
            continue
        server = agent.rollout.server
        for url, place in zip(server.urls, server.places, strict=True):
            if place in users:
                raise ConfigError(
                    f"agents.{name}.rollout.server.urls: {url} is also a server of "
                    f"{users[place]!r}, whose weights are others: give each agent servers of its "
                    "own, or one policy (share) or base (base)"
                )
            users[place] = name


def check_adapters(agent: str, base: Sequence[str], lora: LoraConfig | None) -> None:
    """Raise ConfigError unless ``agent`` is one of ``base``, the agents over one base, and has
    adapters.
    """
    if base and agent not in base:
        raise ConfigError(
            f"agent={agent!r} is none of base={list(base)}: expected all agents over one base"
        )
    if base and (lora is None or not lora.rank):
        raise ConfigError(
            f"the agents {list(base)} are over one base (agents.{agent}.base), which is frozen, "
            "and there are no "
            "adapters with trainer.lora.rank=0; give trainer.lora a rank, or leave out base"
        )


def _check_base(agents: Mapping[str, AgentConfig], name: str, agent: AgentConfig) -> None:
    earlier = [other for other in [*agents][: [*agents].index(name)] if agents[other].share is None]
    first = agent.base[0]
    if agent.base == [name] or first not in (name, *earlier):
        raise ConfigError(
            f"agents.{name}.base={first!r}: expected an agent named before it that has a policy of "
            f"its own ({earlier}){did_you_mean(first, earlier)}"
        )
    if agent.share is not None:
        raise ConfigError(
            f"agents.{name}.base={first!r} and share={agent.share!r}: one that shares a policy has "
            "its adapters; leave one of them out"
        )
    if agent.base != agents[first].base:
        other = next(iter(agents[first].base), None)
        raise ConfigError(
            f"agents.{name}.base={first!r}: that agent's base is {other!r}; give the same one"
        )
    check_adapters(name, agent.base, agent.trainer.lora)
    if agent.trainer.park:
        raise ConfigError(
            f"agents.{name}.trainer.park=true: a base that agents have in common stays on the "
            "device; leave it out"
        )
    network = [f"trainer.{f.name}" for f in fields(TrainerConfig) if f.name not in OPTIMIZING]
    engine = [f"rollout.{f.name}" for f in fields(RolloutConfig) if f.name not in SAMPLING]
    key = _differs(agent, agents[first], ["model", *network, *engine])
    if key:
        raise ConfigError(
            f"agents.{name}.{key} differs from that of {first!r}, whose base it has: give it under "
            f"agents.{first}, or leave out agents.{name}.base"
        )


def _check_share(agents: Mapping[str, AgentConfig], name: str, agent: AgentConfig) -> None:
    earlier = [other for other in [*agents][: [*agents].index(name)] if agents[other].share is None]
    if agent.share not in earlier:
        raise ConfigError(
            f"agents.{name}.share={agent.share!r}: expected an agent named before it that has a "
            f"policy of its own ({earlier}){did_you_mean(str(agent.share), earlier)}"
        )
    other = agents[str(agent.share)]
    own = [f"rollout.{f.name}" for f in fields(RolloutConfig) if f.name not in SAMPLING]
    key = _differs(agent, other, ["model", "trainer", "algorithm", *own])
    if key:
        raise ConfigError(
            f"agents.{name}.{key} differs from that of {agent.share!r}, whose engine and policy it "
            f"shares: give it under agents.{agent.share}, or leave out agents.{name}.share"
        )


def _differs(agent: AgentConfig, other: AgentConfig, keys: Sequence[str]) -> str | None:
    """Return the first key in which two agents differ; None where they are alike."""
    of = [attrgetter(key) for key in keys]
    return next(
        (key for key, value in zip(keys, of, strict=True) if value(agent) != value(other)), None
    )
