"""GRPO (arXiv:2402.03300): the advantage compares the samples of one prompt, so there is no critic.

    python -m siirl_dask.recipes.grpo configs/quickstart.yaml trainer.lr=5e-5

Rewards and log-probs are computed side by side, on different workers, and joined by the advantage.
Without ``algorithm.kl_coefficient`` there is no reference policy, as in DAPO (arXiv:2503.14476):
one model fewer in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from siirl_dask.config import Config
from siirl_dask.nodes import encode_prompts, estimate_advantage, generate, score
from siirl_dask.planner import DAG, Node, Rows, resolve
from siirl_dask.recipes.common import (
    Function,
    advantage_of,
    learning,
    prompt_options,
    roles,
    with_reference,
)


def grpo(
    config: Config,
    *,
    reward: Function | None = None,
    advantage: Function | None = None,
    loss: Function | None = None,
    reference: Function | None = None,
    columns: Sequence[str] = (),
) -> DAG:
    """Return the DAG of GRPO, or of an algorithm that differs in functions only (Dr.GRPO, GSPO,
    CISPO, RLOO, ...).

    Each of ``reward``, ``advantage`` and ``loss`` replaces the function that the configuration
    names. ``reference`` is the node that gets reference log-probs from the policy, such as
    ``siirl_dask.nodes.average_logprobs``. ``columns`` are further columns for the loss. ConfigError
    for an ``algorithm.*`` key that an argument would override.
    """
    estimate = {"advantage": advantage_of(config, advantage)}
    placement = Rows(str(config.rollout.prompt_placement))
    sample = {"rollout": config.rollout}
    nodes = (
        Node("prompts", encode_prompts, role="rollout", options=prompt_options(config)),
        Node(
            "rollout",
            generate,
            role="rollout",
            after="prompts",
            rows=placement,
            stage=True,
            options=sample,
        ),
        Node("reward", score, role="reward", after="rollout"),
        Node(
            "old_logprobs",
            resolve(config.algorithm.old_logprobs),
            role="policy",
            after="rollout",
            rows=Rows.BALANCED,
        ),
        Node(
            "advantage",
            estimate_advantage,
            role="policy",
            after=("reward", "old_logprobs"),
            rows=Rows.GROUPED,
            save_as="rollouts",
            options=estimate,
        ),
        *learning(config, loss, columns),
    )
    return with_reference(DAG(roles(config, reward), nodes), config, reference)


if __name__ == "__main__":
    from siirl_dask import main

    main(grpo)
