"""The recipe of several agents: the YAML's DAG, each agent's own keys, shared policies, fan-out
and rounds.
"""

from dataclasses import replace
from functools import partial

import pyarrow as pa
import pytest

from siirl_dask import agents
from siirl_dask.config import AlgorithmConfig
from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.driver.phases import dags, validation_of
from siirl_dask.errors import ConfigError
from siirl_dask.planner import compile_chains
from siirl_dask.recipes.agents import validation
from siirl_dask.recipes.marft import marft
from siirl_dask.schema import make_schema
from siirl_dask.tasks.splitting import ask_to_sort
from tests.recipes.keys import NEEDS, OTHER_VALUES, check_no_key_is_ignored, same_dag

DATASET = make_schema({"prompt": pa.string(), "answer": pa.string()})


def config(*overrides):
    return load(shipped("quickstart_agents"), overrides)


def names(dag, ending=""):
    return {node.name for node in dag.nodes if node.name.endswith(ending)}


def test_the_recipe_makes_the_dag_that_the_yaml_spells():
    assert same_dag(partial(agents, message=ask_to_sort))(
        load_config_file(shipped("quickstart_agents"))
    )


def test_the_validation_of_the_recipe_is_the_one_that_the_yaml_spells():
    file = load_config_file(shipped("quickstart_agents"))
    made = validation(file.config, message=ask_to_sort)
    assert made.nodes == dags(file)[1].nodes


def test_the_validation_of_one_model_is_refused_for_several():
    with pytest.raises(
        ConfigError, match=r"'rollout', which no role binds .*give validation_nodes"
    ):
        validation_of(config(), agents(config()), None)


def test_a_run_with_one_agent_or_none_is_refused():
    with pytest.raises(ConfigError, match=r"agents has \[\]: this DAG is of at least two"):
        agents(load(shipped("quickstart")))


@pytest.mark.parametrize("agent", ["a", "b"])
def test_no_key_of_an_agents_algorithm_is_ignored_and_none_reaches_another(agent):
    start, other = config(), {"a": "b", "b": "a"}[agent]
    for key, value in OTHER_VALUES.items():
        dags_made = []
        before = replace(AlgorithmConfig(), **NEEDS.get(key, {}))
        for algorithm in (before, replace(before, **{key: value})):
            own = {**start.agents, agent: replace(start.agents[agent], algorithm=algorithm)}
            dags_made.append(agents(replace(start, agents=own)))
        first, second = ({node.name: node.key for node in dag.nodes} for dag in dags_made)
        changed = {
            name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
        }
        assert changed, key
        assert all(name.endswith(f"_{agent}") for name in changed), (key, changed)
        assert not [name for name in changed if name.endswith(f"_{other}")]


def test_agents_that_share_a_policy_have_one_engine_and_one_update_of_all_their_rows():
    shared = config("agents.b.model.path=runs/splitting-0/a", "agents.b.share=a")
    dag = agents(shared)
    assert [role.name for role in dag.roles] == ["reward", "rollout_a", "policy_a"]
    assert dag.node("rollout_b").role == "rollout_a"
    assert dag.node("turns_a").options["agents"] == ("a", "b")
    assert not names(dag, "_b") & {"update_b", "weights_b", "turns_b"}
    compile_chains(dag, ["0", "1"], DATASET)


def test_agents_over_one_base_are_told_to_their_roles_in_the_yaml_as_well():
    one = ["agents.b.model.path=runs/splitting-0/a", "trainer.lora.rank=4", "agents.b.base=a"]
    file = load_config_file(shipped("quickstart_agents"), one)
    made = agents(file.config, message=ask_to_sort)
    assert same_dag(lambda config: made)(file)
    for role in made.roles[1:]:
        assert role.build.keywords["agent"] == role.name[-1]
        assert role.build.keywords["base"] == ("a", "b")


def test_marft_makes_the_dag_that_its_yaml_spells_and_agents_learn_after_the_critics_advantage():
    file = load_config_file(shipped("quickstart_marft"))
    assert same_dag(partial(marft, message=ask_to_sort))(file)
    assert dags(file)[1].nodes == validation(file.config, message=ask_to_sort).nodes
    dag = marft(file.config, rounds=2)
    assert dag.node("values").after == ("turns",)
    assert dag.node("advantage").options["team"]
    assert {dag.node(f"turns_{agent}").after for agent in "ab"} == {("advantage",)}
    assert not names(dag, "advantage_a")
    own = [
        "cluster.placement={}",
        "algorithm.advantage=siirl_dask.algorithms:marft",
        "algorithm.kl_coefficient=0.1",
    ]
    with_reference = marft(config(*own))
    assert with_reference.node("minibatches_b").after == ("old_logprobs_b", "reference_logprobs_b")
    compile_chains(with_reference, ["0", "1"], DATASET)


def test_each_key_of_the_algorithm_changes_what_marft_does():
    check_no_key_is_ignored(_of_the_run, load(shipped("quickstart_marft")))


def _of_the_run(given):
    """Give each agent the run's algorithm, as a file does."""
    own = {name: replace(agent, algorithm=given.algorithm) for name, agent in given.agents.items()}
    return marft(replace(given, agents=own))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "agents.b.algorithm.advantage=siirl_dask.algorithms:marft_tokens",
            r"agents\.b\.algorithm\.advantage=.*have one",
        ),
        (
            "agents.b.rollout.n=3",
            r"agents\.b\.rollout\.n=3: MARFT takes the agents of an episode for one sequence",
        ),
    ],
)
def test_marft_refuses_what_has_no_sequence_or_no_team(override, said):
    with pytest.raises(ConfigError, match=said):
        marft(load(shipped("quickstart_marft"), [override]))


def test_solvers_of_one_proposal_are_compared_with_each_other():
    dag = agents(config("agents.b.rollout.n=3"))
    assert dag.node("turns").options["groups"] == {"b": "a"}
    assert str(dag.node("turns").rows) == "grouped"
    draws = {agent: dag.node(f"minibatches_{agent}").options for agent in "ab"}
    assert (draws["a"]["batch_size"], draws["a"]["n"]) == (32, 24)
    assert (draws["b"]["batch_size"], draws["b"]["n"]) == (256, 3)


def test_rounds_write_the_turns_out_and_each_agent_learns_once():
    dag = agents(config(), rounds=3)
    assert {f"rollout_{name}" for name in ("a", "b", "a_2", "b_2", "a_3", "b_3")} <= names(dag)
    assert dag.node("reward").after == ("rollout_b_3",)
    assert dag.node("turns").options["rounds"] == 3
    assert len([node for node in dag.nodes if node.name.startswith("update")]) == 2
    compile_chains(
        dag, ["0", "1", "2"], DATASET, {"rollout_a": [0], "rollout_b": [1, 2], "policy_a": [1]}
    )


def test_three_agents_and_a_reference_each_where_it_is_asked_for():
    dag = agents(
        config("agents.c.rollout.temperature=0.5", "agents.b.algorithm.kl_coefficient=0.1")
    )
    assert {role.name for role in dag.roles if role.name.startswith("reference")} == {"reference_b"}
    assert dag.node("advantage_b").after == ("old_logprobs_b", "reference_logprobs_b")
    compile_chains(dag, ["0", "1"], DATASET)
