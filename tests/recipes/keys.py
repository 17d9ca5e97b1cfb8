"""Checks of recipes, scripts and YAML files: they make the DAG of a config, and heed every
``algorithm.*`` key.
"""

import json
from dataclasses import asdict, fields, replace

from siirl_dask.config import AlgorithmConfig
from siirl_dask.config.file import load_config_file
from siirl_dask.driver.phases import dags
from siirl_dask.errors import UserError

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
    "old_logprobs": "siirl_dask.nodes:rollout_logprobs",
    "correction": "siirl_dask.algorithms:masked_is",
    "correction_options": {"level": "sequence"},
    "minibatches": 3,
    "split_groups": True,
    "epochs": 2,
    "critic_warmup_steps": 2,
}
"""A value of each ``algorithm.*`` key that is not its default."""
NEEDS = {
    "advantage_options": {"advantage": "siirl_dask.algorithms:grpo", "advantage_options": {}},
    "aggregation_options": {
        "aggregation": "siirl_dask.algorithms:sequence_mean_token_sum_norm",
        "aggregation_options": {"length": 5},
    },
    "correction_options": {"correction": "siirl_dask.algorithms:truncated_is"},
}
"""Functions that have the options."""


def same_dag(recipe):
    """Return a check that the recipe makes the DAG that a config file spells."""

    def compare(file):
        spelled, made = dags(file)[0], recipe(file.config)
        assert sorted(node.key for node in made.nodes) == sorted(node.key for node in spelled.nodes)
        return {role.key for role in made.roles} == {role.key for role in spelled.roles}

    return compare


def spelled_by(path):
    """Return the YAML file's DAG as a function of its config, as recipes are."""

    def dag(config):
        overrides = [
            f"algorithm.{key}={json.dumps(value)}"
            for key, value in asdict(config.algorithm).items()
        ]
        return dags(load_config_file(path, overrides))[0]

    return dag


def check_no_key_is_ignored(recipe, config, refused=()):
    """Change each key of the algorithm: the DAG must change, or for a key in ``refused`` an
    error name it.
    """
    assert {field.name for field in fields(AlgorithmConfig)} == set(OTHER_VALUES)
    for key, value in OTHER_VALUES.items():
        before = replace(config.algorithm, **NEEDS.get(key, {}))
        after = replace(before, **{key: value})
        assert after != before, f"give another value of {key}"
        made, said = _made(recipe, config, after)
        if key in refused:
            assert f"algorithm.{key.removesuffix('_options')}" in said, key
            continue
        assert not said, key
        assert made != _made(recipe, config, before)[0], key


def _made(recipe, config, algorithm):
    """Return the recipe's DAG and an empty text, or None and the error that refuses it."""
    try:
        return recipe(replace(config, algorithm=algorithm)), ""
    except UserError as error:
        return None, str(error)
