"""GRPO written node by node, as the recipe siirl_dask.grpo does for you.

    python pipelines/from_scratch.py configs/quickstart.yaml run.name=from_scratch

A node is a function of a table, run on the workers of its role. The planner reads the functions'
``@columns`` to find the columns of each edge. Rewards and log-probs are computed side by side on
different workers, and joined by the advantage.
"""

from functools import partial

from siirl_dask import DAG, Config, Node, Role, Rows, main, nodes
from siirl_dask.algorithms import grpo, policy_loss, ppo_clip
from siirl_dask.planner import resolve
from siirl_dask.recipes.common import check_reads
from siirl_dask.rewards import build_scorer
from siirl_dask.rollout import build_engine
from siirl_dask.training import build_trainer


def training(config: Config) -> DAG:
    check_reads(config, "minibatches")
    model, rollout, minibatches = config.model, config.rollout, config.algorithm.minibatches
    reward = resolve(config.rewards.function)
    roles = (
        Role("rollout", partial(build_engine, model=model, rollout=rollout)),
        Role("reward", partial(build_scorer, rewards=config.rewards, reward=reward)),
        Role(
            "policy", partial(build_trainer, model=model, trainer=config.trainer, rollout=rollout)
        ),
    )
    loss = partial(policy_loss, surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.28))
    encode = {"max_prompt_length": config.data.max_prompt_length}
    sample = {"rollout": rollout}
    draw = {"minibatches": minibatches, "batch_size": config.data.batch_size}
    update = {"minibatches": minibatches, "loss": loss}
    balanced = {"role": "policy", "rows": Rows.BALANCED}
    everywhere = Rows.REPLICATED
    chain = (
        Node("prompts", nodes.encode_prompts, role="rollout", options=encode),
        Node(
            "rollout", nodes.generate, role="rollout", after="prompts", stage=True, options=sample
        ),
        Node("reward", nodes.score, role="reward", after="rollout"),
        Node("old_logprobs", nodes.policy_logprobs, after="rollout", **balanced),
        Node(
            "advantage",
            nodes.estimate_advantage,
            role="policy",
            after=("reward", "old_logprobs"),
            rows=Rows.GROUPED,
            save_as="rollouts",
            options={"advantage": grpo},
        ),
        Node("minibatches", nodes.draw_minibatches, role="policy", after="advantage", options=draw),
        Node("update", nodes.update_policy, after="minibatches", options=update, **balanced),
        Node("weights", nodes.publish_weights, role="policy", after="update"),
        Node("load_weights", nodes.load_weights, role="rollout", after="weights", rows=everywhere),
    )
    return DAG(roles, chain)


if __name__ == "__main__":
    main(training)
