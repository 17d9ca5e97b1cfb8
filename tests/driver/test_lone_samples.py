"""One sample of each prompt and an advantage that compares them: nothing would be learned, and
nobody would notice.
"""

import json
import re
from functools import partial

import pytest

from siirl_dask import algorithms
from siirl_dask.algorithms import (
    dr_grpo,
    dr_mas,
    gae,
    gigpo,
    gpg,
    grpo,
    hierarchical_grpo,
    magrpo,
    marft,
    marft_tokens,
    max_rl,
    mt_grpo,
    opo,
    pass_at_k,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    turn_gae,
    turn_returns,
)  # fmt: skip
from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.checks.preflight import _check_lone_samples
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.nodes import (
    estimate_advantage,
    estimate_agent_advantages,
    estimate_token_advantages,
    estimate_turn_advantages,
)
from siirl_dask.planner.contract import contract_of

COMPARING = [
    grpo,
    max_rl,
    partial(grpo, scale="batch"),
    dr_grpo,
    rloo,
    opo,
    pass_at_k,
    gpg,
    partial(gpg, divide_by_std=True),
]


def with_own_baseline(outcomes):
    return outcomes.rewards - 0.5


def with_baseline_of_the_batch(outcomes):
    """A group of one is compared with the batch."""
    alone = len(outcomes.group_ids.unique()) == len(outcomes.group_ids)
    return outcomes.rewards - outcomes.rewards.mean() if alone else grpo(outcomes)


def first_dag(config, *overrides):
    return next(
        dag for dag in dags(load_config_file(shipped(config), overrides)) if dag is not None
    )


@pytest.mark.parametrize("advantage", COMPARING)
def test_an_advantage_that_compares_samples_needs_several(advantage):
    assert contract_of(estimate_advantage).learns_alone(advantage=advantage) is False


@pytest.mark.parametrize("advantage", [remax, with_own_baseline, with_baseline_of_the_batch])
def test_an_advantage_with_another_baseline_does_not(advantage):
    assert contract_of(estimate_advantage).learns_alone(advantage=advantage) is True


@pytest.mark.parametrize(
    ("advantage", "whiten", "learns"),
    [
        (gae, False, True),
        (algorithms.reinforce_plus_plus, False, True),
        (reinforce_plus_plus_baseline, True, True),
        (reinforce_plus_plus_baseline, False, False),
        (algorithms.optimal_token_baseline, False, False),
    ],
)
def test_advantages_of_tokens_are_asked_alike(advantage, whiten, learns):
    assert (
        contract_of(estimate_token_advantages).learns_alone(advantage=advantage, whiten=whiten)
        is learns
    )


OF_TURNS = [
    (gigpo, False, False),
    (gigpo, True, True),
    (mt_grpo, False, False),
    (partial(mt_grpo, weight=0.5), False, False),
    (magrpo, False, False),
    (magrpo, True, False),
    (turn_returns, False, True),
    (partial(turn_returns, discount=1.0), False, True),
    (partial(turn_returns, same_turn=True), False, False),
    (turn_gae, False, True),
    (marft, False, True),
    (marft_tokens, True, True),
]


@pytest.mark.parametrize(("advantage", "whiten", "learns"), OF_TURNS)
def test_advantages_of_turns_that_compare_episodes_need_several(advantage, whiten, learns):
    asked = contract_of(estimate_turn_advantages).learns_alone
    assert asked(advantage=advantage, team=False, whiten=whiten) is learns


@pytest.mark.parametrize("proposal", [None, "proposal"])
@pytest.mark.parametrize("advantage", [dr_mas, partial(dr_mas, divide_by_std=False)])
def test_advantages_of_agents_that_compare_episodes_need_several(advantage, proposal):
    assert (
        contract_of(estimate_agent_advantages).learns_alone(advantage=advantage, proposal=proposal)
        is False
    )


@pytest.mark.parametrize("mean_of_answers", [False, True])
def test_proposers_are_compared_with_other_proposers(mean_of_answers):
    advantage = partial(hierarchical_grpo, proposer="writer", mean_of_answers=mean_of_answers)
    assert (
        contract_of(estimate_agent_advantages).learns_alone(advantage=advantage, proposal="number")
        is False
    )


def rewards_of_agents(outcomes):
    return outcomes.rewards - 0.5


def test_an_own_advantage_of_agents_with_another_baseline_needs_no_second_episode():
    assert contract_of(estimate_agent_advantages).learns_alone(advantage=rewards_of_agents) is True


def test_turns_of_one_episode_of_each_prompt_are_refused_where_episodes_are_compared(tmp_path):
    own = {"advantage": {"run": "siirl_dask.nodes:estimate_turn_advantages"}}
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"base": str(shipped("quickstart_turns.yaml")), "nodes": own}))

    def dag(name, n):
        given = [f"rollout.n={n}", f"algorithm.advantage=siirl_dask.algorithms:{name}"]
        return next(iter(dags(load_config_file(file, given))))

    with pytest.raises(
        ConfigError, match=r"rollout\.n=1: node 'advantage' compares .*algorithms:gigpo"
    ):
        _check_lone_samples(dag("gigpo", 1))
    _check_lone_samples(dag("turn_returns", 1))
    _check_lone_samples(dag("gigpo", 2))


def test_likeness_to_successes_of_the_same_prompt_needs_several_samples(tmp_path):
    likeness = {
        "run": "siirl_dask.nodes:score_by_similarity",
        "role": "reward",
        "after": "reward",
        "rows": "grouped",
    }
    file = tmp_path / "own.yaml"
    file.write_text(
        json.dumps(
            {
                "base": str(shipped("quickstart_reinforce_plus_plus.yaml")),
                "nodes": {"likeness": likeness},
            }
        )
    )
    dag = next(iter(dags(load_config_file(file, ["rollout.n=1"]))))
    with pytest.raises(
        ConfigError,
        match=r"node 'likeness' .*score_by_similarity.* it does nothing; .*without this",
    ):
        _check_lone_samples(dag)


@pytest.mark.parametrize(
    "config", ["quickstart.yaml", "quickstart_rloo.yaml", "quickstart_dr_grpo.yaml"]
)
def test_one_sample_of_each_prompt_is_refused(config):
    said = "rollout.n=1: node 'advantage' compares the samples of a prompt"
    with pytest.raises(ConfigError, match=re.escape(said)):
        _check_lone_samples(first_dag(config, "rollout.n=1"))
    _check_lone_samples(first_dag(config, "rollout.n=2"))


def test_dynamic_sampling_of_one_sample_is_refused():
    dag = first_dag("quickstart_dapo.yaml", "rollout.n=1")
    with pytest.raises(
        PlanError, match=re.escape("rollout.n=1: no prompt has samples whose rewards differ")
    ):
        dag.node("rollout").try_options()


@pytest.mark.parametrize("config", ["quickstart_ppo.yaml", "quickstart_reinforce_plus_plus.yaml"])
def test_algorithms_without_a_group_have_one_sample(config):
    _check_lone_samples(first_dag(config, "rollout.n=1"))


def test_agents_after_the_first_have_one_turn_of_each_row():
    _check_lone_samples(first_dag("quickstart_agents.yaml"))


def test_plan_refuses_before_anything_starts(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(shipped("quickstart.yaml")), "rollout.n=1"])
    assert stopped.value.code == 2
    assert "algorithms:grpo), and each prompt has one" in capsys.readouterr().err.replace("\n", " ")
