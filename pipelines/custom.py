"""A reward, a node, an advantage and a loss of one's own, in one page.

    python pipelines/custom.py configs/quickstart.yaml run.name=custom validation.url=null validation.test_url=null

The node measures how long a response is within its group, the advantage favours what is both right and short, and the
loss is a plain policy gradient that leaves out tokens the policy is sure of. All are functions; nothing is registered.
"""

from functools import partial

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.algorithms import LossInputs, Outcomes, TokenLoss, grpo, policy_loss
from siirl_dask.cli import run_pipeline
from siirl_dask.config import Config
from siirl_dask.context import Context
from siirl_dask.nodes import (
    draw_minibatches,
    encode_prompts,
    estimate_advantage,
    generate,
    load_weights,
    policy_logprobs,
    publish_weights,
    score,
    update_policy,
)
from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.rewards import build_scorer
from siirl_dask.rollout import build_engine
from siirl_dask.training import build_trainer


def near_enough(prompt: str, response: str, answer: str, **extra: object) -> dict[str, float]:
    """What is in a dict beside ``reward`` becomes a metric, and can be queried in the rollouts."""
    given, wanted = response.split(), answer.split()
    right = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(1, len(wanted))
    return {"reward": right, "exact": float(given == wanted)}


@columns(reads=["response_ids"], writes={"brevity": pa.float32()})
def measure_brevity(ctx: Context, table: pa.Table) -> pa.Table:
    lengths = [len(tokens) for tokens in table["response_ids"].to_pylist()]
    ctx.log("brevity/length", lengths)
    return table.append_column("brevity", pa.array([1 / max(1, length) for length in lengths], pa.float32()))


def short_and_right(outcomes: Outcomes) -> Tensor:
    """GRPO's advantage, less for longer responses. [R]."""
    return grpo(outcomes) / outcomes.lengths.clamp(min=1).sqrt()


def unsure_tokens(inputs: LossInputs, *, least_entropy: float) -> TokenLoss:
    """``-logp A`` where the policy's entropy is at least that; elsewhere 0. [K]."""
    unsure = (inputs.entropy.detach() >= least_entropy).float()
    brevity = inputs.columns["brevity"]
    loss = -inputs.logprobs * inputs.advantages * unsure
    return TokenLoss(loss=loss, metrics={"unsure": unsure, "brevity": torch.as_tensor(brevity)})


def training(config: Config) -> DAG:
    model, trainer, rollout, minibatches = config.model, config.trainer, config.rollout, config.algorithm.minibatches
    roles = (
        Role("rollout", partial(build_engine, model=model, rollout=rollout)),
        Role("reward", partial(build_scorer, rewards=config.rewards, reward=near_enough)),
        Role("policy", partial(build_trainer, model=model, trainer=trainer, rollout=rollout)),
    )
    loss = partial(policy_loss, surrogate=partial(unsure_tokens, least_entropy=0.01))
    encode = partial(encode_prompts, max_prompt_length=config.data.max_prompt_length, rollout=config.rollout)
    advantage = partial(estimate_advantage, advantage=short_and_right)
    draw = partial(draw_minibatches, minibatches=minibatches, batch_size=config.data.batch_size)
    update = partial(update_policy, loss=loss, minibatches=minibatches, columns=("brevity",))
    nodes = (
        Node("prompts", encode, "rollout"),
        Node("rollout", partial(generate, rollout=rollout), "rollout", ("prompts",), Rows(rollout.rows)),
        Node("brevity", measure_brevity, "rollout", ("rollout",)),
        Node("reward", score, "reward", ("rollout",)),
        Node("old_logprobs", policy_logprobs, "policy", ("rollout",), Rows.BALANCED),
        Node("advantage", advantage, "policy", ("brevity", "reward", "old_logprobs"), Rows.GROUPED, keep="rollouts"),
        Node("minibatches", draw, "policy", ("advantage",)),
        Node("update", update, "policy", ("minibatches",), Rows.BALANCED),
        Node("weights", publish_weights, "policy", ("update",)),
        Node("load_weights", load_weights, "rollout", ("weights",), Rows.REPLICATED),
    )
    return DAG(roles, nodes)


if __name__ == "__main__":
    run_pipeline(training)
