"""MARFT (arXiv:2504.16129): several agents that act in turn, and one critic over the sequence of
all that they say.

    python -m siirl_dask.recipes.marft configs/quickstart_marft.yaml critic.lr=1e-3

The DAG is that of ``siirl_dask.agents`` with one advantage for the team in place of one for each
agent: the critic reads what an agent reads, earlier agents' words included, and what follows an
agent's turn is the next agent's. Left out are MARFT's Huber loss of the values, its limit of the
KL, and agents that learn by turns.
"""

from __future__ import annotations

from functools import partial

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError
from siirl_dask.nodes import (
    draw_minibatches,
    estimate_turn_advantages,
    estimate_values,
    update_critic,
)
from siirl_dask.planner import DAG, Node, Role, Rows
from siirl_dask.recipes.agents import agents
from siirl_dask.recipes.common import Function, advantage_of
from siirl_dask.schema import TOKEN_TURNS
from siirl_dask.training import build_critic


def marft(
    config: Config,
    *,
    reward: Function | None = None,
    message: Function | None = None,
    rounds: int = 1,
) -> DAG:
    """Return the DAG of a chain of agents with one critic.

    ``algorithm.advantage`` names a function of TurnOutcomes over all agents:
    ``siirl_dask.algorithms:marft``, with the loss ``turn_clip``, or ``marft_tokens`` for one ratio
    a token. ``critic`` is the run's, on the run's ``model``. Other arguments as in ``agents``.
    ConfigError for an agent with another advantage, or that answers a turn several times.
    """
    _check(config)
    algorithm = config.algorithm
    draw = {
        "minibatches": algorithm.minibatches,
        "batch_size": config.data.batch_size,
        "n": config.rollout.n,
        "split_groups": algorithm.split_groups,
    }
    estimate = {"advantage": advantage_of(config, None), "team": True, "whiten": True}
    update = {"minibatches": algorithm.minibatches, "epochs": algorithm.epochs}
    dag = agents(config, reward=reward, message=message, rounds=rounds).add(
        Node("values", estimate_values, role="critic", after="turns", rows=Rows.BALANCED),
        Node(
            "advantage",
            estimate_turn_advantages,
            role="critic",
            after="values",
            rows=Rows.GROUPED,
            options=estimate,
        ),
        Node("minibatches", draw_minibatches, role="critic", after="advantage", options=draw),
        Node(
            "update_critic",
            update_critic,
            role="critic",
            after="minibatches",
            rows=Rows.BALANCED,
            options=update,
        ),
        roles=(
            Role(
                "critic",
                partial(
                    build_critic,
                    model=config.model,
                    trainer=config.critic,
                    images=config.images,
                ),
            ),
        ),
    )
    for name in (name for name, agent in config.agents.items() if agent.share is None):
        before = dag.node(f"advantage_{name}").after
        dag = dag.replace(f"minibatches_{name}", after=before).without(f"advantage_{name}")
        dag = dag.replace(f"turns_{name}", after="advantage")
        dag = dag.replace(f"update_{name}", options={"columns": (TOKEN_TURNS,)})
    return dag


def _check(config: Config) -> None:
    team = (config.algorithm.advantage, config.algorithm.advantage_options)
    for place, (name, agent) in enumerate(config.agents.items()):
        if (agent.algorithm.advantage, agent.algorithm.advantage_options) != team:
            raise ConfigError(
                f"agents.{name}.algorithm.advantage={agent.algorithm.advantage}: the agents of "
                f"MARFT have one advantage; set algorithm.advantage, which is {team[0]}"
            )
        if place and agent.rollout.n > 1:
            raise ConfigError(
                f"agents.{name}.rollout.n={agent.rollout.n}: MARFT takes the agents of an episode "
                "for one sequence, in which each turn is answered once; leave it at 1"
            )


if __name__ == "__main__":
    from siirl_dask import main
    from siirl_dask.recipes.agents import validation

    main(marft, validation)
