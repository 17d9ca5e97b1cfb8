"""A value that a DAG cannot take is reported where it was written, not where a base takes it."""

from __future__ import annotations

import re

import pytest

from siirl_dask.config.file import load_config_file
from siirl_dask.driver.phases import dags
from siirl_dask.errors import PlanError

FUNCTIONS = [
    "rewards.function",
    "algorithm.advantage",
    "algorithm.aggregation",
    "algorithm.correction",
    "algorithm.kl",
    "algorithm.loss",
]
OPTIONS = ["rewards.options", "algorithm.advantage_options", "algorithm.loss_options"]


def error_of(path, *overrides):
    with pytest.raises(PlanError) as raised:
        dags(load_config_file(path, [*overrides]))
    return str(raised.value)


def written(folder, key, value):
    group, name = key.split(".")
    path = folder / "mine.yaml"
    path.write_text(
        f"base: siirl_dask:quickstart.yaml\nvalidation: {{every: 1}}\n{group}:\n  {name}: {value}\n"
    )
    return path


def wrong(key):
    return "{no_such: 1}" if key in OPTIONS else "no_such:function"


@pytest.mark.parametrize("key", [*FUNCTIONS, *OPTIONS])
def test_a_value_that_the_dag_cannot_take_is_reported_at_its_line(tmp_path, key):
    path = written(tmp_path, key, wrong(key))
    message = error_of(path)
    assert message.startswith(f"{path}:4: {key}, in ")
    assert re.search(r"dags/grpo\.yaml:\d+: (role|node) '", message)
    assert "no_such" in message


@pytest.mark.parametrize("key", [*FUNCTIONS, *OPTIONS])
def test_an_override_that_the_dag_cannot_take_is_named(tmp_path, key):
    override = f"{key}={wrong(key)}"
    path = written(tmp_path, "run.steps", 3)
    assert error_of(path, override).startswith(f"override '{override}', in ")
    path = written(tmp_path, key, "another:one")
    assert error_of(path, override).startswith(f"override '{override}', in ")


def test_of_several_keys_that_of_the_value_in_the_message_is_named(tmp_path):
    path = written(tmp_path, "rewards.options", "{flexible: true}")
    message = error_of(path, "rewards.function=no_such:function")
    assert message.startswith("override 'rewards.function=no_such:function', in ")
    path.write_text(f"{path.read_text()}  function: siirl_dask.rewards:exact_match\n")
    message = error_of(path)
    assert message.startswith(f"{path}:5: rewards.function, {path}:4: rewards.options, in ")


def test_an_error_of_a_node_s_own_line_names_that_line_alone(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: siirl_dask:quickstart.yaml\nnodes:\n  update: {with: {no_such: 1}}\n"
        "algorithm: {loss: 'siirl_dask.algorithms:gspo'}\n"
    )
    assert error_of(path).startswith(f"{path}:3, over ")
