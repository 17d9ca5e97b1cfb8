"""Several agents that act in turn: each its own model, engine, policy and optimizer, or one that
they share.

    python -m siirl_dask.recipes.agents configs/quickstart_agents.yaml agents.b.trainer.lr=5e-5

The agents of ``agents:`` act in the order in which they are named, ``rounds`` times over; each is
told what the one before it wrote (``hand_over``). The reward of the last turn is every agent's
(``bring_out``). Each agent learns by what its ``algorithm`` says, from its own turns alone:
advantages are those of one agent (Dr. MAS, arXiv:2602.08847).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod

from siirl_dask.config import AgentConfig, Config, ValidationConfig
from siirl_dask.errors import ConfigError
from siirl_dask.nodes import (
    append_response,
    bring_out,
    encode_prompts,
    estimate_advantage,
    generate,
    generate_answers,
    hand_over,
    measure_answers,
    score,
    take_agents,
)
from siirl_dask.nodes.episodes.agents import MESSAGE
from siirl_dask.planner import DAG, Node, Role, Rows, bare, resolve
from siirl_dask.recipes.common import (
    Function,
    advantage_of,
    learning,
    prompt_options,
    roles,
    with_reference,
)
from siirl_dask.recipes.validation import measure_options


def agents(
    config: Config,
    *,
    reward: Function | None = None,
    message: Function | None = None,
    rounds: int = 1,
) -> DAG:
    """Return the DAG of a chain of agents.

    ``reward`` replaces ``rewards.function``; it is asked once an episode, after the last turn.
    ``message`` makes of an agent's turn what the next one is told (``hand_over``). ConfigError
    without ``agents``.
    """
    _check_agents(config)
    acting = list(_acting(config, rounds, message))
    last = _turn_name(*_turns(config, rounds)[-1])
    fans_out = any(agent.rollout.n > 1 for agent in [*config.agents.values()][1:])
    together: dict[str, object] = {"agents": tuple(config.agents)}
    if rounds > 1:
        together["rounds"] = rounds
    groups = _groups(config)
    if groups:
        together["groups"] = groups
    joint = (
        Node("reward", score, role="reward", after=f"rollout_{last}"),
        Node(
            "turns",
            bring_out,
            role="reward",
            after="reward",
            rows=Rows.GROUPED if fans_out else Rows.ANYWHERE,
            save_as="rollouts",
            options=together,
        ),
    )
    dag = DAG(_roles(config, reward), (*acting, *joint))
    for name in _learners(config):
        dag = with_learner(dag, config, name, after="turns")
    return dag


def with_learner(dag: DAG, config: Config, agent: str, *, after: str) -> DAG:
    """Return ``dag`` with the nodes that are alike for every agent: from its rows to its engine's
    new weights.

    ``after`` is the node with the rows of all agents. ``algorithm`` and ``trainer`` are those of
    ``agents.NAME``. Each node's name, and each role's, ends with ``_NAME``.
    """
    own = _view(config, agent)
    groups = _groups_per_prompt(config, agent)
    episodes = prod(other.rollout.n for other in config.agents.values())
    own.data = replace(own.data, batch_size=own.data.batch_size * groups)
    own.rollout = replace(own.rollout, n=episodes // groups)
    learns = tuple(name for name, other in config.agents.items() if agent in (name, other.share))
    options = {"advantage": advantage_of(own, None)}
    nodes = (
        Node("rollout", take_agents, role="reward", options={"agents": learns}),
        Node(
            "old_logprobs",
            resolve(own.algorithm.old_logprobs),
            role="policy",
            after="rollout",
            rows=Rows.BALANCED,
        ),
        Node(
            "advantage",
            estimate_advantage,
            role="policy",
            after="old_logprobs",
            rows=Rows.GROUPED,
            options=options,
        ),
        *learning(own),
    )
    alone = with_reference(DAG(roles(own), nodes), own)
    named = {node.name: node.name for node in alone.nodes}
    named["rollout"] = "turns"
    return dag.add(
        *(_of_agent(node, agent, named, after) for node in alone.nodes),
        roles=[_role(role, agent) for role in alone.roles if role.name == "reference"],
    )


def validation(config: Config, *, message: Function | None = None) -> DAG:
    """Return the validation DAG of ``agents``: the first agent answers as ``validation`` says,
    the others once each.
    """
    _check_agents(config)
    settings = config.validation
    once = ValidationConfig(n=1, temperature=settings.temperature, top_p=settings.top_p)
    nodes: list[Node] = []
    for node in _acting(config, 1, message):
        if bare(node.fn) is generate:
            sample = {
                "rollout": node.options["rollout"],
                "validation": once if nodes[1:] else settings,
            }
            node = replace(node, fn=generate_answers, options=sample, stage=False)
        nodes.append(node)
    last = nodes[-1].name
    joint = (
        Node("reward", score, role="reward", after=last, save_as="validation"),
        Node(
            "measure",
            measure_answers,
            role="reward",
            after="reward",
            rows=Rows.GROUPED,
            options=measure_options(config),
        ),
    )
    return DAG(_roles(config, None), (*nodes, *joint))


def _turns(config: Config, rounds: int) -> list[tuple[str, int]]:
    return [(name, number) for number in range(1, rounds + 1) for name in config.agents]


def _turn_name(agent: str, number: int) -> str:
    if number == 1:
        return agent
    return f"{agent}_{number}"


def _acting(config: Config, rounds: int, message: Function | None) -> Iterator[Node]:
    """Yield the nodes of all turns: each agent but the first is handed over what the one before
    it wrote.
    """
    before = ""
    turns = _turns(config, rounds)
    for place, (agent, number) in enumerate(turns):
        own = _view(config, agent)
        name = _turn_name(agent, number)
        role = f"rollout_{_engine_of(config, agent)}"
        own_column = {}
        if place != 0:
            own_column = {"column": MESSAGE}
        placement = Rows(str(own.rollout.prompt_placement))
        sampled = own.rollout if number == 1 else replace(own.rollout, n=1)
        yield Node(
            f"prompts_{name}",
            encode_prompts,
            role=role,
            after=before or (),
            options=prompt_options(own) | own_column,
            agent=agent,
        )
        yield Node(
            f"rollout_{name}",
            generate,
            role=role,
            after=f"prompts_{name}",
            rows=placement,
            stage=True,
            options={"rollout": sampled},
            agent=agent,
        )
        before = f"rollout_{name}"
        if place < len(turns) - 1:
            given = {"agent": agent, "message": message or append_response} | (
                {"round": number} if number > 1 else {}
            )
            yield Node(
                f"hand_over_{name}",
                hand_over,
                role=role,
                after=before,
                options=given,
                agent=agent,
            )
            before = f"hand_over_{name}"


def _roles(config: Config, reward: Function | None) -> tuple[Role, ...]:
    """Return the scorer, and an engine and a policy of each agent that has its own."""
    made = [role for role in roles(config, reward) if role.name == "reward"]
    for name in _learners(config):
        own = {"agent": name, "base": tuple(config.agents[name].base)}
        made += [
            replace(_role(role, name), build=partial(role.build, **own))
            for role in roles(_view(config, name), reward)
            if role.name != "reward"
        ]
    return tuple(made)


def _role(role: Role, agent: str) -> Role:
    return replace(role, name=f"{role.name}_{agent}")


def _of_agent(node: Node, agent: str, named: dict[str, str], after: str) -> Node:
    """Return a node of a single agent's DAG under the agent's name."""
    parents: tuple[str, ...] | str = after
    if node.after:
        parents = tuple(f"{named[parent]}_{agent}" for parent in node.after)
    role = node.role if node.role == "reward" else f"{node.role}_{agent}"
    return replace(node, name=f"{named[node.name]}_{agent}", role=role, after=parents, agent=agent)


def _learners(config: Config) -> list[str]:
    return [name for name, agent in config.agents.items() if agent.share is None]


def _engine_of(config: Config, agent: str) -> str:
    shared = config.agents[agent].share
    if shared is None:
        return agent
    return shared


def _view(config: Config, agent: str) -> Config:
    """Return the configuration as one agent sees it."""
    own: AgentConfig = config.agents[agent]
    return replace(
        config,
        model=own.model,
        rollout=own.rollout,
        trainer=own.trainer,
        algorithm=own.algorithm,
        agents={},
    )


def _groups(config: Config) -> dict[str, str]:
    """Return the agents that answer a turn several times, each with the agent whose turn they
    answer: these answers are compared with each other, and no others.
    """
    return {
        name: before
        for before, name in pairwise(config.agents)
        if config.agents[name].rollout.n > 1
    }


def _groups_per_prompt(config: Config, agent: str) -> int:
    """Return the number of groups of a prompt within which the turns of an agent are compared."""
    if agent not in _groups(config):
        return 1
    before = list(config.agents)[: list(config.agents).index(agent)]
    return prod(config.agents[name].rollout.n for name in before)


def _check_agents(config: Config) -> None:
    if len(config.agents) < 2:
        raise ConfigError(
            f"agents has {[*config.agents]}: this DAG is of at least two, as in agents: {{a: {{}}, "
            f"b: {{}}}}"
        )


if __name__ == "__main__":
    from siirl_dask import main

    main(agents, validation)
