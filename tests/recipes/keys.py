"""Checks that a recipe or a script makes the DAG that a config spells, and heeds every key of the algorithm."""

from dataclasses import fields, replace

from siirl_dask.config import AlgorithmConfig
from siirl_dask.driver.phases import dags
from siirl_dask.errors import SiirlError

OTHER_VALUES = {
    "advantage": "siirl_dask.algorithms:rloo",
    "advantage_options": {"epsilon": 0.5},
    "loss": "siirl_dask.algorithms:cispo",
    "loss_options": {"clip_high": 0.9},
    "aggregation": "siirl_dask.algorithms:sequence_mean_token_mean",
    "aggregation_options": {"length": 7},
    "kl": "siirl_dask.algorithms:k1",
    "kl_coefficient": 0.25,
    "kl_bias_correction": True,
    "entropy_coefficient": 0.25,
    "correction": "siirl_dask.algorithms:masked_is",
    "correction_options": {"most": 3.0},
    "minibatches": 3,
    "split_groups": True,
    "epochs": 2,
    "critic_warmup_steps": 2,
}
"""A value of each ``algorithm.*`` key that is not its default."""
NEEDS = {"correction_options": {"correction": "siirl_dask.algorithms:truncated_is"}}
"""Keys that are refused without another one."""


def same_dag(recipe):
    """Whether the recipe makes the DAG that a config file spells."""

    def compare(file):
        spelled, made = dags(file)[0], recipe(file.config)
        assert sorted(node.key for node in made.nodes) == sorted(node.key for node in spelled.nodes)
        return {role.key for role in made.roles} == {role.key for role in spelled.roles}

    return compare


def check_no_key_is_ignored(recipe, config):
    """Change each key of the algorithm: the DAG must change, or the recipe refuse."""
    assert {field.name for field in fields(AlgorithmConfig)} == set(OTHER_VALUES)
    for key, value in OTHER_VALUES.items():
        before = replace(config.algorithm, **NEEDS.get(key, {}))
        after = replace(before, **{key: value})
        if after == before:
            continue
        made = _made(recipe, config, after)
        assert made is None or made != _made(recipe, config, before), key


def _made(recipe, config, algorithm):
    """What the recipe makes; None where it refuses."""
    try:
        return recipe(replace(config, algorithm=algorithm))
    except SiirlError:
        return None
