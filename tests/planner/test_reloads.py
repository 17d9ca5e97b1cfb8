"""After which nodes an engine's weights need not be kept: new ones come before anything else
asks for it.
"""

from dataclasses import replace

import pytest

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import assumed_columns, dags
from siirl_dask.planner import Node, compile_chains
from siirl_dask.planner.reloads import always_reloaded, reloaded_after
from siirl_dask.recipes import validation_dag
from tests.planner.random_dags import same_rows

LEARNS = frozenset({"policy", "reference", "critic"})


def chain_of(name, *overrides, change=lambda dag: dag, validation=False, placement=None):
    """Return the chain of the first worker, which has every role unless ``placement`` says
    otherwise.
    """
    file = load_config_file(shipped(name), overrides)
    dag = change(dags(file)[0])
    dag = validation_dag(file.config, dag) if validation else dag
    return compile_chains(dag, ["a", "b"], assumed_columns(file.config), placement).chains["a"]


def reloaded(chain):
    return {name for name, roles in reloaded_after(chain).items() if "rollout" in roles}


def test_weights_that_a_step_replaces_need_not_be_kept_from_generation_on():
    chain = chain_of("quickstart.yaml")
    assert reloaded(chain) == {
        "rollout",
        "reward",
        "old_logprobs",
        "advantage",
        "minibatches",
        "update",
        "weights",
    }
    assert reloaded_after(chain)["prompts"] == reloaded_after(chain)["load_weights"] == frozenset()
    assert always_reloaded(chain, "rollout", LEARNS)


def test_no_weights_follow_a_validation():
    assert reloaded(chain_of("quickstart.yaml", validation=True)) == set()


def test_an_engine_that_a_later_node_asks_first_keeps_its_weights():
    def judged(dag):
        judge = Node("judge", same_rows, role="rollout", after="old_logprobs")
        return dag.add(judge).replace("advantage", after=("reward", "judge"))

    chain = chain_of("quickstart.yaml", change=judged)
    assert "old_logprobs" not in reloaded(chain)
    assert {"update", "weights"} <= reloaded(chain)
    assert not always_reloaded(chain, "rollout", LEARNS)


def test_an_engine_that_no_weights_reach_keeps_its_own():
    def judged(dag):
        judge = replace(dag.role("rollout"), name="judge")
        return dag.add(Node("judge", same_rows, role="judge", after="rollout"), roles=(judge,))

    chain = chain_of("quickstart.yaml", change=judged)
    assert all("judge" not in roles for roles in reloaded_after(chain).values())
    assert not always_reloaded(chain, "judge", LEARNS)
    assert always_reloaded(chain, "rollout", LEARNS)


def test_weights_that_come_after_the_next_generation_count_for_nothing():
    apart = {"rollout": [0], "reward": [0], "policy": [1]}
    assert "reward" in reloaded(chain_of("quickstart.yaml", placement=apart))
    assert (
        reloaded(chain_of("quickstart.yaml", "rollout.max_staleness=1", placement=apart)) == set()
    )


@pytest.mark.parametrize("whole", [(), ("weights",)])
def test_it_does_not_matter_how_the_weights_travel(whole):
    file = load_config_file(shipped("quickstart.yaml"), [])
    plan = compile_chains(dags(file)[0], ["a", "b"], assumed_columns(file.config), whole=whole)
    for chain in plan.chains.values():
        assert always_reloaded(chain, "rollout", LEARNS)


def test_a_critic_that_learns_after_the_weights_have_come_does_not_lose_them():
    chain = chain_of("quickstart_ppo.yaml")
    assert list(reloaded_after(chain))[-2:] == ["load_weights", "update_critic"]
    assert "update_critic" not in reloaded(chain)
    assert "update" in reloaded(chain)
    assert not always_reloaded(chain, "rollout", LEARNS)
