"""Parts that recipes share: roles, and the update with its loss. Together they read every
``algorithm.*`` key.

No key is ignored: one that an argument of the recipe replaces must be left at its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from siirl_dask.algorithms import policy_loss
from siirl_dask.config import AlgorithmConfig, Config
from siirl_dask.errors import ConfigError
from siirl_dask.nodes import (
    base_logprobs,
    draw_minibatches,
    load_weights,
    publish_weights,
    reference_logprobs,
    update_policy,
)
from siirl_dask.planner import DAG, Node, Role, Rows, bind, resolve
from siirl_dask.rewards import build_scorer
from siirl_dask.rollout import build_engine
from siirl_dask.training import build_reference, build_trainer

Function = Callable[..., Any]


def roles(config: Config, reward: Function | None = None) -> tuple[Role, ...]:
    """Return the engine, the scorer and the policy. ``reward`` replaces ``rewards.function``."""
    if reward is None:
        function = resolve(config.rewards.function)
        reward = bind(function, config.rewards.options, "rewards.options")
    model = config.model
    rollout = config.rollout
    return (
        Role(
            "rollout",
            partial(
                build_engine,
                model=model,
                rollout=rollout,
                lora=config.trainer.lora,
                images=config.images,
            ),
        ),
        Role("reward", partial(build_scorer, rewards=config.rewards, reward=reward)),
        Role(
            "policy",
            partial(
                build_trainer,
                model=model,
                trainer=config.trainer,
                rollout=rollout,
                images=config.images,
            ),
        ),
    )


def prompt_options(config: Config) -> dict[str, Any]:
    """Return the options of ``encode_prompts``."""
    return {
        "max_prompt_length": config.data.max_prompt_length,
        "rollout": config.rollout,
        "images": config.images,
        "continue_answers": config.data.continue_answers,
    }


def play_options(config: Config) -> dict[str, Any]:
    """Return the options of ``play`` and ``play_answers`` besides how they sample."""
    return {
        "environments": config.environments,
        "max_prompt_length": config.data.max_prompt_length,
        "images": config.images,
    }


def advantage_of(config: Config, advantage: Function | None) -> Function:
    """Return ``advantage``, or the function of ``algorithm.advantage``. ConfigError if both are
    given.
    """
    return _chosen(config.algorithm, "advantage", advantage)


def loss_of(config: Config, loss: Function | None) -> Function:
    """Return the policy's loss: ``loss``, or ``algorithm.loss``, with its KL, entropy and
    correction terms.

    ConfigError if both ``loss`` and ``algorithm.loss`` are given.
    """
    algorithm = config.algorithm
    correction = None
    if algorithm.correction is not None:
        options = algorithm.correction_options
        correction = bind(resolve(algorithm.correction), options, "algorithm.correction_options")
    return partial(
        policy_loss,
        surrogate=_chosen(algorithm, "loss", loss),
        kl=resolve(algorithm.kl),
        kl_coefficient=algorithm.kl_coefficient,
        kl_bias_correction=algorithm.kl_bias_correction,
        entropy_coefficient=algorithm.entropy_coefficient,
        correction=correction,
    )


def learning(
    config: Config, loss: Function | None = None, columns: Sequence[str] = ()
) -> tuple[Node, ...]:
    """Return the nodes from mini-batches to engines with new weights. The loss gets ``columns``
    in LossInputs.
    """
    algorithm = config.algorithm
    draw = {
        "minibatches": algorithm.minibatches,
        "batch_size": config.data.batch_size,
        "n": config.rollout.n,
        "split_groups": algorithm.split_groups,
    }
    update: dict[str, Any] = {
        "loss": loss_of(config, loss),
        "aggregate": partial(resolve(algorithm.aggregation), **algorithm.aggregation_options),
        "minibatches": algorithm.minibatches,
        "epochs": algorithm.epochs,
        "critic_warmup_steps": algorithm.critic_warmup_steps,
        "max_staleness": config.rollout.max_staleness,
        "old_logprobs": algorithm.old_logprobs,
    }
    if columns:
        update["columns"] = tuple(columns)
    steps_ahead = config.rollout.steps_ahead
    lag = 0 if steps_ahead is None else steps_ahead
    lora = {"lora": config.trainer.lora}
    return (
        Node("minibatches", draw_minibatches, role="policy", after="advantage", options=draw),
        Node(
            "update",
            update_policy,
            role="policy",
            after="minibatches",
            rows=Rows.BALANCED,
            options=update,
        ),
        Node("weights", publish_weights, role="policy", after="update", options=lora),
        Node(
            "load_weights",
            load_weights,
            role="rollout",
            after="weights",
            rows=Rows.REPLICATED,
            lag=lag,
            options=lora,
        ),
    )


def with_reference(dag: DAG, config: Config, function: Function | None = None) -> DAG:
    """Return ``dag`` with the reference log-probs that ``algorithm.kl_coefficient`` needs;
    unchanged if that is 0.

    ``function`` is a node's function that gets them from the policy. Without one, the reference of
    a policy with adapters is the same policy without its adapters; of any other policy, a role of
    its own. ConfigError for a function that no term of the loss needs.
    """
    if not config.algorithm.kl_coefficient:
        if function is not None:
            raise ConfigError(
                f"reference={function.__name__} with algorithm.kl_coefficient=0: no term of the "
                "loss needs a reference; give it a weight, or leave the argument out"
            )
        return dag
    reference = Node(
        "reference_logprobs",
        base_logprobs,
        role="policy",
        after="rollout",
        rows=Rows.BALANCED,
    )
    if function is not None:
        dag = dag.add(replace(reference, fn=function))
    elif config.trainer.lora.rank:
        dag = dag.add(reference)
    else:
        build = partial(
            build_reference,
            model=config.model,
            trainer=config.trainer,
            rollout=config.rollout,
            images=config.images,
        )
        reference = replace(reference, fn=reference_logprobs, role="reference")
        dag = dag.add(reference, roles=(Role("reference", build),))
    return dag.replace("advantage", after=(*dag.node("advantage").after, reference.name))


def check_reads(config: Config, *keys: str) -> None:
    """Raise ConfigError for an ``algorithm.*`` key that is set, although the DAG reads ``keys``
    only.
    """
    default = AlgorithmConfig()
    for field in fields(AlgorithmConfig):
        name = field.name
        value = getattr(config.algorithm, name)
        if name not in keys and value != getattr(default, name):
            raise ConfigError(
                f"algorithm.{name}={value!r}: this DAG does not read it; leave it out"
            )


def _chosen(algorithm: AlgorithmConfig, key: str, function: Function | None) -> Function:
    """Return ``function``, or the one that ``algorithm.<key>`` names. ConfigError if both are
    given.
    """
    name: str = getattr(algorithm, key)
    options: Mapping[str, Any] = getattr(algorithm, f"{key}_options")
    if function is None:
        return partial(resolve(name), **options)
    if name != getattr(AlgorithmConfig(), key) or options:
        configured = f"algorithm.{key}={name}"
        if options:
            configured += f" with {key}_options={dict(options)}"
        argument = getattr(function, "__name__", function)
        raise ConfigError(
            f"{configured}, and the recipe was given {key}={argument}: expected one of them; bind "
            "options to the function with functools.partial"
        )
    return function
