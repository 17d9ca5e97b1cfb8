"""GRPO (arXiv:2402.03300) without its KL to a reference policy, as in DAPO (arXiv:2503.14476): one model fewer in
memory.

    python pipelines/grpo.py configs/quickstart.yaml trainer.lr=5e-5

The DAG below is the one that configs/quickstart.yaml spells in YAML; a test holds the two equal. Rewards and
log-probs are computed side by side on different workers and joined by the advantage.
"""

from functools import partial

from siirl_dask.algorithms import policy_loss
from siirl_dask.cli import run_pipeline
from siirl_dask.config import Config
from siirl_dask.nodes import (
    ColumnPath,
    draw_minibatches,
    encode_prompts,
    estimate_advantage,
    generate,
    generate_answers,
    load_weights,
    measure_answers,
    policy_logprobs,
    publish_weights,
    score,
    update_policy,
)
from siirl_dask.planner import DAG, Node, Role, Rows, resolve
from siirl_dask.rewards import build_scorer
from siirl_dask.rollout import build_engine
from siirl_dask.training import build_trainer


def roles(config: Config) -> tuple[Role, ...]:
    model, trainer, rollout = config.model, config.trainer, config.rollout
    return (
        Role("rollout", partial(build_engine, model=model, rollout=rollout)),
        Role("reward", partial(build_scorer, rewards=config.rewards, reward=resolve(config.rewards.function))),
        Role("policy", partial(build_trainer, model=model, trainer=trainer, rollout=rollout)),
    )


def training(config: Config) -> DAG:
    algorithm, batch_size = config.algorithm, config.data.batch_size
    encode = partial(encode_prompts, max_prompt_length=config.data.max_prompt_length, rollout=config.rollout)
    advantage = partial(resolve(algorithm.advantage), **algorithm.advantage_options)
    draw = partial(
        draw_minibatches,
        minibatches=algorithm.minibatches,
        batch_size=batch_size,
        n=config.rollout.n,
        split_groups=algorithm.split_groups,
    )
    correction = algorithm.correction and partial(resolve(algorithm.correction), **algorithm.correction_options)
    loss = partial(
        policy_loss,
        surrogate=partial(resolve(algorithm.loss), **algorithm.loss_options),
        kl=resolve(algorithm.kl),
        kl_coefficient=algorithm.kl_coefficient,
        entropy_coefficient=algorithm.entropy_coefficient,
        correction=correction,
    )
    aggregate = partial(resolve(algorithm.aggregation), **algorithm.aggregation_options)
    update = partial(
        update_policy,
        loss=loss,
        aggregate=aggregate,
        minibatches=algorithm.minibatches,
        epochs=algorithm.epochs,
        critic_warmup_steps=algorithm.critic_warmup_steps,
        max_staleness=config.rollout.max_staleness,
    )
    nodes = (
        Node("prompts", encode, "rollout"),
        Node("rollout", partial(generate, rollout=config.rollout), "rollout", ("prompts",), Rows(config.rollout.rows)),
        Node("reward", score, "reward", ("rollout",)),
        Node("old_logprobs", policy_logprobs, "policy", ("rollout",), Rows.BALANCED),
        Node(
            "advantage",
            partial(estimate_advantage, advantage=advantage),
            "policy",
            ("reward", "old_logprobs"),
            Rows.GROUPED,
            keep="rollouts",
        ),
        Node("minibatches", draw, "policy", ("advantage",)),
        Node("update", update, "policy", ("minibatches",), Rows.BALANCED),
        Node("weights", publish_weights, "policy", ("update",)),
        Node("load_weights", load_weights, "rollout", ("weights",), Rows.REPLICATED, behind=config.rollout.ahead or 0),
    )
    return DAG(roles(config), nodes)


def validation(config: Config) -> DAG:
    given = config.validation
    encode = partial(encode_prompts, max_prompt_length=config.data.max_prompt_length, rollout=config.rollout)
    sample = partial(generate_answers, rollout=config.rollout, validation=given)
    measure = partial(
        measure_answers,
        n=given.n,
        k=tuple(given.k),
        source=ColumnPath(given.source),
        extract=resolve(given.extract) if given.extract else None,
    )
    nodes = (
        Node("prompts", encode, "rollout"),
        Node("rollout", sample, "rollout", ("prompts",), Rows(config.rollout.rows)),
        Node("reward", score, "reward", ("rollout",), keep="validation"),
        Node("measure", measure, "reward", ("reward",), Rows.GROUPED),
    )
    return DAG(roles(config), nodes)


if __name__ == "__main__":
    run_pipeline(training, validation)
