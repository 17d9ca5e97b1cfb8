"""The validation that goes with any training DAG: its roles answer and score other prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from siirl_dask.config import Config
from siirl_dask.nodes import (
    ColumnPath,
    encode_prompts,
    generate_answers,
    measure_answers,
    play,
    play_answers,
    sample_until_mixed,
    score,
)
from siirl_dask.planner import DAG, Node, Rows, bare, resolve
from siirl_dask.recipes.common import play_options, prompt_options


def validation_dag(config: Config, dag: DAG) -> DAG:
    """Return the validation DAG of a training DAG, whose roles ``rollout`` and ``reward`` answer
    and score. PlanError if the training DAG does not have these roles.

    Where the training DAG plays in environments, they reward the answers.
    """
    settings = config.validation
    measure = measure_options(config)
    placement = Rows(str(config.rollout.prompt_placement))
    sample = {"rollout": config.rollout, "validation": settings}
    prompts = Node("prompts", encode_prompts, role="rollout", options=prompt_options(config))
    answers = Node(
        "rollout",
        generate_answers,
        role="rollout",
        after="prompts",
        rows=placement,
        options=sample,
    )
    score_of = Node("reward", score, role="reward", after="rollout", save_as="validation")
    measured = Node(
        "measure",
        measure_answers,
        role="reward",
        after="reward",
        rows=Rows.GROUPED,
        options=measure,
    )
    if not any(bare(node.fn) is play for node in dag.nodes):
        return DAG(dag.roles, (prompts, answers, score_of, measured))
    answers = replace(
        answers,
        fn=play_answers,
        options=sample | play_options(config),
        save_as="validation",
    )
    return DAG(dag.roles, (prompts, answers, replace(measured, role="rollout", after="rollout")))


def scored_as_training(validation: DAG, dag: DAG) -> DAG:
    """Return ``validation`` with the columns that the nodes of ``dag`` pass to the reward function of
    the same role, where a node that scores names none: a reward would be computed by the defaults
    of its arguments otherwise.
    """
    for node in validation.nodes:
        if bare(node.fn) is not score or "columns" in node.options:
            continue
        passed = _passed_to_reward(dag, node.role)
        if passed:
            validation = validation.replace(node.name, options={"columns": passed})
    return validation


def _passed_to_reward(dag: DAG, role: str) -> tuple[str, ...]:
    """Return the columns that the nodes of ``dag`` pass to the reward function of ``role``."""
    passed: list[str] = []
    for node in dag.nodes:
        function = bare(node.fn)
        scorer = None
        if function is score:
            scorer = node.role
        if function is sample_until_mixed:
            scorer = node.options.get("scorer", "reward")
        if scorer == role:
            named = node.options.get("columns", ())
            passed += [name for name in named if name not in passed]
    return tuple(passed)


def measure_options(config: Config) -> dict[str, Any]:
    """Return the options of ``measure_answers``."""
    settings = config.validation
    extract = None
    if settings.answer_extractor:
        extract = resolve(settings.answer_extractor)
    return {
        "n": settings.n,
        "k": tuple(settings.k),
        "source": ColumnPath(settings.source_column),
        "extract": extract,
    }
