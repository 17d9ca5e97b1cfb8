"""GRPO (arXiv:2402.03300) over episodes of several turns: an environment answers the policy, and
rewards its turns.

    python -m siirl_dask.recipes.turns configs/quickstart_turns.yaml environments.turns=5

One node plays in place of generation and reward. Only the policy's own tokens learn; an episode's
return is compared with those of the other episodes of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from siirl_dask.config import Config
from siirl_dask.environments import build_environments
from siirl_dask.nodes import play
from siirl_dask.planner import DAG, Role, resolve
from siirl_dask.recipes.common import Function, play_options
from siirl_dask.recipes.grpo import grpo


def turns(
    config: Config,
    *,
    environment: Function | None = None,
    advantage: Function | None = None,
    loss: Function | None = None,
    columns: Sequence[str] = (),
) -> DAG:
    """Return the DAG of GRPO over episodes, with the environments and tools that ``environments.*``
    names.

    ``environment`` replaces ``environments.environment``: a class, or a function that makes one.
    Other arguments as in ``grpo``.
    """
    sample = {"rollout": config.rollout} | play_options(config)
    dag = grpo(config, advantage=advantage, loss=loss, columns=columns)
    dag = dag.replace(
        "advantage", after=tuple(name for name in dag.node("advantage").after if name != "reward")
    )
    dag = dag.without("reward").replace("rollout", fn=play, options=sample)
    roles = (
        *(role for role in dag.roles if role.name != "reward"),
        environments_role(config, environment),
    )
    return DAG(roles, dag.nodes)


def environments_role(config: Config, environment: Function | None = None) -> Role:
    """Return the role of the environments and tools that ``environments.*`` names; arguments as
    in ``turns``.
    """
    given = config.environments
    if environment is None and given.environment is not None:
        environment = resolve(given.environment)
    build = partial(
        build_environments,
        environments=given,
        environment=environment,
        by_name={name: resolve(spelled) for name, spelled in given.by_name.items()},
        tools=[resolve(tool) for tool in given.tools],
        model=config.model,
    )
    return Role("environments", build)


if __name__ == "__main__":
    from siirl_dask import main

    main(turns)
