"""GRPO (arXiv:2402.03300) without its KL to a reference policy, as in DAPO (arXiv:2503.14476): one model fewer in
memory.

    python pipelines/grpo.py configs/quickstart.yaml trainer.lr=5e-5

The DAG below is the one that configs/quickstart.yaml spells in YAML; a test holds the two equal. Rewards and
log-probs are computed side by side on different workers and joined by the advantage.
"""

from functools import partial

from siirl_dask.cli import run_pipeline
from siirl_dask.config import Config
from siirl_dask.nodes import (
    draw_minibatches,
    encode_prompts,
    estimate_advantage,
    generate,
    generate_greedy,
    load_weights,
    policy_logprobs,
    publish_weights,
    score,
    update_policy,
)
from siirl_dask.planner import DAG, Node, Role, Rows, resolve
from siirl_dask.rollout import build_engine
from siirl_dask.training import build_trainer


def roles(config: Config) -> tuple[Role, ...]:
    model, trainer, rollout = config.model, config.trainer, config.rollout
    return (
        Role("rollout", partial(build_engine, model=model, rollout=rollout)),
        Role("policy", partial(build_trainer, model=model, trainer=trainer, rollout=rollout)),
    )


def training(config: Config) -> DAG:
    algorithm, batch_size = config.algorithm, config.data.batch_size
    encode = partial(encode_prompts, max_prompt_length=config.data.max_prompt_length)
    reward = partial(score, reward=resolve(config.rewards.function))
    advantage = partial(estimate_advantage, advantage=resolve(algorithm.advantage))
    draw = partial(draw_minibatches, minibatches=algorithm.minibatches, batch_size=batch_size)
    loss = partial(
        resolve(algorithm.loss),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coefficient=algorithm.kl_coefficient,
    )
    update = partial(update_policy, loss=loss, minibatches=algorithm.minibatches)
    nodes = (
        Node("prompts", encode, "rollout"),
        Node("rollout", partial(generate, rollout=config.rollout), "rollout", ("prompts",)),
        Node("reward", reward, "rollout", ("rollout",)),
        Node("old_logprobs", policy_logprobs, "policy", ("rollout",), Rows.BALANCED),
        Node("advantage", advantage, "policy", ("reward", "old_logprobs"), Rows.GROUPED, keep="rollouts"),
        Node("minibatches", draw, "policy", ("advantage",)),
        Node("update", update, "policy", ("minibatches",), Rows.BALANCED),
        Node("weights", publish_weights, "policy", ("update",)),
        Node("load_weights", load_weights, "rollout", ("weights",), Rows.REPLICATED),
    )
    return DAG(roles(config), nodes)


def validation(config: Config) -> DAG:
    encode = partial(encode_prompts, max_prompt_length=config.data.max_prompt_length)
    reward = partial(score, reward=resolve(config.rewards.function))
    nodes = (
        Node("prompts", encode, "rollout"),
        Node("rollout", partial(generate_greedy, rollout=config.rollout), "rollout", ("prompts",)),
        Node("reward", reward, "rollout", ("rollout",), keep="validation"),
    )
    return DAG(roles(config), nodes)


if __name__ == "__main__":
    run_pipeline(training, validation)
