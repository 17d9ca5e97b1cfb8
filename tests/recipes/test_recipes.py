"""Recipes make the DAGs that the shipped configs spell, heed every key, and take functions of
one's own.
"""

from functools import partial

import pytest

from siirl_dask import dapo, grpo, ppo, turns
from siirl_dask.algorithms import k2, ppo_clip, rloo, truncated_is
from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.driver.phases import dags, validation_of
from siirl_dask.errors import ConfigError
from siirl_dask.nodes import average_logprobs, base_logprobs, estimate_turn_advantages, score
from siirl_dask.planner.contract import bare
from siirl_dask.rewards import exact_match
from tests.recipes.keys import check_no_key_is_ignored, same_dag, spelled_by

SPELLED = {
    "quickstart": grpo,
    "grpo_kl": grpo,
    "quickstart_dr_grpo": grpo,
    "quickstart_gspo": grpo,
    "quickstart_ppo": ppo,
    "quickstart_turns": turns,
}
RECIPES = {
    "grpo": (grpo, "quickstart"),
    "ppo": (ppo, "quickstart_ppo"),
    "dapo": (dapo, "quickstart_dapo"),
    "turns": (turns, "quickstart_turns"),
}


@pytest.mark.parametrize("config", SPELLED)
def test_a_recipe_makes_the_dag_that_the_yaml_spells(config):
    assert same_dag(SPELLED[config])(load_config_file(shipped(config)))


def test_a_product_of_corrections_is_the_same_dag_in_yaml_and_in_python(tmp_path):
    path = tmp_path / "combined.yaml"
    path.write_text(
        f"""base: {shipped("quickstart")}
algorithm:
  correction: siirl_dask.algorithms:combined
  correction_options:
    parts:
      - {{run: "siirl_dask.algorithms:reject_divergent", with: {{limit: 0.1, estimate: "siirl_dask.algorithms:k2"}}}}
      - siirl_dask.algorithms:truncated_is
"""
    )
    file = load_config_file(path)
    assert same_dag(grpo)(file)
    correction = grpo(file.config).node("update").options["loss"].keywords["correction"]
    mask, weight = correction.keywords["parts"]
    assert mask.keywords == {"limit": 0.1, "estimate": k2}
    assert weight is truncated_is


def test_the_recipe_of_dapo_makes_its_dag_but_for_half_the_penalty():
    file = load_config_file(shipped("quickstart_dapo"))
    halved = dapo(file.config).replace("reward", options={"factor": 0.5})
    assert same_dag(lambda config: halved)(file)


@pytest.mark.parametrize("config", SPELLED)
def test_the_validation_of_a_recipe_is_the_one_that_the_yaml_spells(config):
    file = load_config_file(shipped(config))
    _, spelled = dags(file)
    made = validation_of(file.config, SPELLED[config](file.config), None)
    assert made is not None
    assert made.nodes == spelled.nodes


@pytest.mark.parametrize("config", SPELLED)
@pytest.mark.parametrize("way", ["default", "spelled"])
def test_validation_passes_a_reward_the_columns_that_training_passes_it(config, way):
    file = load_config_file(shipped(config))
    recipe = SPELLED[config]
    dag = recipe(file.config)
    scored = [node.name for node in dag.nodes if bare(node.fn) is score]
    for name in scored:
        dag = dag.replace(name, options={"columns": ("difficulty",)})
    spelled = dags(file)[1] if way == "spelled" else None
    made = validation_of(file.config, dag, spelled)
    for node in made.nodes:
        if bare(node.fn) is score:
            assert node.options["columns"] == ("difficulty",)
            chosen = made.replace(node.name, options={"columns": ("source",)})
            assert validation_of(file.config, dag, chosen) == chosen
    assert (
        made.nodes != validation_of(file.config, recipe(file.config), spelled).nodes or not scored
    )


def test_validation_passes_a_reward_the_columns_that_dynamic_sampling_passes_it():
    file = load_config_file(shipped("quickstart_dapo"))
    dag = dapo(file.config).replace("rollout", options={"columns": ("difficulty",)})
    made = validation_of(file.config, dag, dags(file)[1])
    assert made.node("reward").options["columns"] == ("difficulty",)


@pytest.mark.parametrize("name", RECIPES)
def test_no_key_of_the_algorithm_is_ignored(name):
    recipe, config = RECIPES[name]
    check_no_key_is_ignored(recipe, load(shipped(config)))


@pytest.mark.parametrize("name", [config for _, config in RECIPES.values()])
def test_no_key_of_the_algorithm_is_ignored_by_a_dag_in_yaml(name):
    check_no_key_is_ignored(spelled_by(shipped(name)), load(shipped(name)))


def test_functions_given_to_a_recipe_replace_those_of_the_config():
    config = load(shipped("quickstart"))
    dag = grpo(
        config,
        reward=exact_match,
        advantage=rloo,
        loss=partial(ppo_clip, clip_low=0.1),
        columns=["extra"],
    )
    assert dag.role("reward").build.keywords["reward"] is exact_match
    assert dag.node("advantage").options["advantage"] is rloo
    assert dag.node("update").options["loss"].keywords["surrogate"].keywords == {"clip_low": 0.1}
    assert dag.node("update").options["columns"] == ("extra",)


@pytest.mark.parametrize(
    ("override", "given"),
    [
        ("algorithm.loss=siirl_dask.algorithms:cispo", {"loss": ppo_clip}),
        ("algorithm.loss_options.clip_high=0.3", {"loss": ppo_clip}),
        ("algorithm.advantage=siirl_dask.algorithms:opo", {"advantage": rloo}),
    ],
)
def test_a_key_that_an_argument_makes_void_is_refused(override, given):
    config = load(shipped("quickstart"), [override])
    (name,) = given
    with pytest.raises(
        ConfigError, match=rf"algorithm\.{name}=.* was given {name}=.*: expected one of them"
    ):
        grpo(config, **given)


def test_credit_for_turns_is_the_same_dag_in_yaml_and_in_python(tmp_path):
    path = tmp_path / "turns.yaml"
    path.write_text(
        f"base: {shipped('quickstart')}\n"
        "algorithm:\n"
        "  advantage: siirl_dask.algorithms:gigpo\n"
        "  advantage_options: {discount: 0.9}\n"
        "  loss: siirl_dask.algorithms:turn_clip\n"
        "nodes:\n"
        '  advantage: {run: "siirl_dask.nodes:estimate_turn_advantages", with: {whiten: true}}\n'
        "  update: {with: {columns: [token_turns]}}\n"
    )

    def recipe(config):
        dag = grpo(config, columns=["token_turns"])
        return dag.replace("advantage", fn=estimate_turn_advantages, options={"whiten": True})

    assert same_dag(recipe)(load_config_file(path))


def test_with_adapters_the_policy_without_them_is_the_reference():
    config = load(shipped("quickstart"), ["algorithm.kl_coefficient=0.1", "trainer.lora.rank=4"])
    dag = grpo(config)
    assert [role.name for role in dag.roles] == ["rollout", "reward", "policy"]
    assert bare(dag.node("reference_logprobs").fn) is base_logprobs
    assert "reference_logprobs" in dag.node("advantage").after


def test_a_recipe_and_a_file_make_the_average_of_the_policy_its_reference(tmp_path):
    given = ["algorithm.kl_coefficient=0.1", "trainer.ema_decay=0.9"]
    spelled = tmp_path / "average.yaml"
    spelled.write_text(f"base: [{shipped('quickstart.yaml')}, {shipped('dags/grpo_average.yaml')}]")
    file = load_config_file(spelled, given)
    assert same_dag(lambda config: grpo(config, reference=average_logprobs))(file)
    assert bare(dags(file)[0].node("reference_logprobs").fn) is average_logprobs
    with pytest.raises(
        ConfigError, match=r"reference=average_logprobs with algorithm\.kl_coefficient=0"
    ):
        grpo(load(shipped("quickstart")), reference=average_logprobs)


def test_an_environment_that_is_given_replaces_that_of_the_config_and_nothing_is_scored():
    dag = turns(load(shipped("quickstart_turns")), environment=dict)
    assert dag.role("environments").build.keywords["environment"] is dict
    assert {role.name for role in dag.roles} == {"rollout", "environments", "policy"}
    assert "reward" not in [node.name for node in dag.nodes]
