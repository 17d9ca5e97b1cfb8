"""The DAG of an evaluation: what answers the prompts, as a run does or the configuration says,
and what rewards it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from siirl_dask.config import Config, EnvironmentsConfig
from siirl_dask.errors import ConfigError, PlanError, clause
from siirl_dask.nodes import (
    encode_prompts,
    eval_table,
    generate_answers,
    measure_answers,
    play,
    play_answers,
    run_agents,
    run_agents_to_validate,
    score,
)
from siirl_dask.nodes.evaluate import eval_table_schema
from siirl_dask.planner import DAG, Node, Role, Rows, all_options, bind, options_of, resolve
from siirl_dask.planner.spec.names import function_name
from siirl_dask.recipes import measure_options
from siirl_dask.recipes.common import play_options, prompt_options
from siirl_dask.recipes.turns import environments_role
from siirl_dask.rewards import build_scorer
from siirl_dask.rollout import build_engine
from siirl_dask.runs.reader import Run, RunReward
from siirl_dask.schema import ANSWER, PROMPT, Schema

TABLE = "generations"
_REWARD = "rewards.function="
_ENVIRONMENTS = tuple(
    f"environments.{key}" for key in ("environment", "by_name", "tools", "mcp_servers")
)
"""Keys that name what a policy acts on."""


@dataclass(frozen=True, slots=True)
class Answering:
    """Nodes and roles that answer the prompts and reward the answers."""

    rewarded_by: str
    """Name of the function, the environment or the agent that the rewards come from."""
    nodes: tuple[Node, ...]
    """Nodes after that of the prompts; rows have rewards after the last one."""
    roles: tuple[Role, ...] = ()
    """Roles besides ``rollout``."""
    episodes: bool = False
    """Whether rows are those of episodes."""
    agents: bool = False
    """Whether an episode has several agents."""


def answering_of(
    run: Run | None,
    config: Config,
    overrides: Sequence[str],
    world: str | None,
) -> Answering:
    """Return what answers as ``run`` does, or, without one, as ``config`` says; its ``overrides``
    come before the run.

    ``world`` is the role with the environments to play in; None: that of the run. ConfigError where
    it cannot be had.
    """
    spec = None
    if run is not None:
        spec = _episodes_of(run)
    named = (
        _is_set(config.environments)
        if run is None
        else any(text.startswith(_ENVIRONMENTS) for text in overrides)
    )
    own_reward = any(text.startswith(_REWARD) for text in overrides)
    if own_reward and (spec or named):
        raise ConfigError(
            "a reward function (--reward, rewards.function) scores single responses, and episodes "
            "are rewarded by their environments, or by their agents: leave it out"
        )
    if world is not None and (run is None or (spec or {}).get("run") is not play):
        raise ConfigError(
            f"--world {world} is for a run with environments: its DAG has no node that plays"
        )
    if named:
        return _playing(config, environments_role(config), "environments")
    if run is None or spec is None:
        scored = RunReward(_own_reward(config)) if run is None or own_reward else run.scoring()
        return _scored(config, scored)
    if spec["run"] is run_agents:
        return _living(run, config, spec)
    name = world
    if not name:
        name = spec["options"]["world"]
    return _playing(config, _recorded_role(run, config, name), name)


def _own_reward(config: Config) -> Callable[..., Any]:
    """Return the function of ``rewards``, with its options."""
    return bind(resolve(config.rewards.function), config.rewards.options, "rewards.options")


def evaluation_dag(config: Config, answering: Answering, data: Schema) -> DAG:
    """Return a DAG that answers and rewards, saves every sample and logs the metrics.

    ``data`` is the schema of the dataloader's tables.
    """
    measure = measure_options(config)
    rollout = Role(
        "rollout",
        partial(build_engine, model=config.model, rollout=config.rollout, images=config.images),
    )
    encode = partial(encode_prompts, **prompt_options(config))
    keep = partial(
        eval_table,
        n=measure["n"],
        source=measure["source"],
        episodes=answering.episodes,
    )
    columns = eval_table_schema(
        data.field(PROMPT).type,
        data.field(ANSWER).type,
        episodes=answering.episodes,
        agents=answering.agents,
    )
    counted = partial(measure_answers, **measure, alone=True)
    last = answering.nodes[-1]
    nodes = (
        Node("prompts", encode, role="rollout"),
        *answering.nodes,
        Node("samples", keep, role=last.role, after=last.name, save_as=TABLE, writes=columns),
        Node("measure", counted, role=last.role, after=last.name, rows=Rows.GROUPED),
    )
    return DAG((rollout, *answering.roles), nodes)


def _scored(config: Config, scoring: RunReward) -> Answering:
    reward = Role("reward", partial(build_scorer, rewards=config.rewards, reward=scoring.reward))
    rewarded = Node(
        "reward", partial(score, columns=scoring.columns), role="reward", after="rollout"
    )
    name = function_name(getattr(scoring.reward, "func", scoring.reward))
    return Answering(name, (_sampling(config, generate_answers), rewarded), (reward,))


def _playing(config: Config, role: Role, name: str) -> Answering:
    """Return episodes with the environments of ``role``, which gets ``name``."""
    node = _sampling(config, play_answers, **play_options(config), world=name)
    given = options_of(role.build)
    kinds = [
        given.get("environment"),
        *(given.get("by_name") or {}).values(),
        *(given.get("tools") or ()),
    ]
    named = ", ".join(
        function_name(getattr(kind, "func", kind)) for kind in kinds if kind is not None
    )
    return Answering(
        named or ", ".join(config.environments.mcp_servers),
        (node,),
        (Role(name, role.build),),
        episodes=True,
        agents=bool(config.environments.agents),
    )


def _living(run: Run, config: Config, spec: Mapping[str, Any]) -> Answering:
    """Return the episodes of the agents that a run's DAG has."""
    options = {name: spec["options"][name] for name in ("agent", "command", "columns")}
    node = _sampling(
        config,
        run_agents_to_validate,
        endpoint=config.endpoint,
        max_prompt_length=config.data.max_prompt_length,
        **options,
    )
    agent = options["agent"]
    name = (
        " ".join(options["command"])
        if agent is None
        else function_name(getattr(agent, "func", agent))
    )
    return Answering(name, (node,), episodes=True)


def _sampling(config: Config, fn: Callable[..., Any], **options: Any) -> Node:
    sample = partial(fn, rollout=config.rollout, validation=config.validation, **options)
    return Node(
        "rollout",
        sample,
        role="rollout",
        after="prompts",
        rows=Rows(str(config.rollout.prompt_placement)),
    )


def _is_set(environments: EnvironmentsConfig) -> bool:
    return any(getattr(environments, key.partition(".")[2]) for key in _ENVIRONMENTS)


def _episodes_of(run: Run) -> dict[str, Any] | None:
    """Return function and options of the node that makes episodes in a run's DAG; None where none
    does.

    ConfigError where its options cannot be imported.
    """
    for node in run.dag["nodes"]:
        try:
            fn = resolve(node["run"])
        except PlanError:
            continue  # a function of the user's that cannot be imported
        if fn not in (play, run_agents):
            continue
        try:
            return {
                "run": fn,
                "options": all_options(bind(fn, node["with"], f"node {node['name']!r}")),
            }
        except PlanError as error:
            raise ConfigError(f"what run {run.url!r} plays cannot be imported: {error}") from error
    return None


def _recorded_role(run: Run, config: Config, name: str) -> Role:
    """Return a role of a run's DAG that has environments, with the options that ``config`` has
    changed.

    ConfigError where there is no such role, or its environments cannot be imported.
    """
    roles = run.dag["roles"]
    if name not in roles:
        raise ConfigError(
            f"--world {name}: run {run.url!r} has no such role: expected one of {[*roles]}"
        )
    try:
        build = bind(resolve(roles[name]["build"]), roles[name]["with"], f"role {name!r}")
    except PlanError as error:
        raise ConfigError(
            f"the environments of run {run.url!r} cannot be imported: {clause(error)}; name one with "
            "environments.environment=module:name"
        ) from error
    given = options_of(build)
    before = run.config
    changed: dict[str, object] = {"model": config.model}
    if given.get("environments") == before.environments:
        changed["environments"] = config.environments
    return Role(
        name, partial(build, **{key: value for key, value in changed.items() if key in given})
    )
