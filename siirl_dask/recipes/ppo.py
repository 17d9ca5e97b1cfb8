"""PPO (arXiv:1707.06347) with a critic and generalized advantage estimation (arXiv:1506.02438).

    python -m siirl_dask.recipes.ppo configs/quickstart_ppo.yaml critic.lr=1e-3

The DAG has two ends: policy and critic learn at the same time, on workers of their own, from one
advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from siirl_dask.config import Config
from siirl_dask.nodes import estimate_token_advantages, estimate_values, update_critic
from siirl_dask.planner import DAG, Node, Role, Rows
from siirl_dask.recipes.common import Function
from siirl_dask.recipes.grpo import grpo
from siirl_dask.training import build_critic


def ppo(
    config: Config,
    *,
    reward: Function | None = None,
    advantage: Function | None = None,
    loss: Function | None = None,
    columns: Sequence[str] = (),
) -> DAG:
    """Return the DAG of PPO: GRPO's with a critic, whose values enter the advantage of each token.

    ``algorithm.advantage`` names a function of TokenOutcomes, such as
    ``siirl_dask.algorithms:gae``. Arguments as in ``grpo``.
    """
    critic = Role(
        "critic",
        partial(build_critic, model=config.model, trainer=config.critic, images=config.images),
    )
    update = {"minibatches": config.algorithm.minibatches, "epochs": config.algorithm.epochs}
    dag = grpo(config, reward=reward, advantage=advantage, loss=loss, columns=columns)
    dag = dag.add(
        Node("values", estimate_values, role="critic", after="rollout", rows=Rows.BALANCED),
        Node(
            "update_critic",
            update_critic,
            role="critic",
            after="minibatches",
            rows=Rows.BALANCED,
            options=update,
        ),
        roles=(critic,),
    )
    after = (*dag.node("advantage").after, "values")
    return dag.replace("advantage", fn=estimate_token_advantages, after=after)


if __name__ == "__main__":
    from siirl_dask import main

    main(ppo)
