"""Values are those that are written, also where YAML reads others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import RunConfig
from siirl_dask.config.file import _override_layers, load
from siirl_dask.config.file.layers import override, text_layer
from siirl_dask.errors import ConfigError

WRITTEN = st.sampled_from(
    [*("007", "0123", "1_000", "1.10", "1e3", "0x10", "12:30:45", "2024.10", "-0", ".5", ".inf")]
)


@given(key=st.sampled_from(["run.name", "agents.a.model.path", "validation.url"]), text=WRITTEN)
def test_a_text_that_yaml_takes_for_a_number_is_as_it_is_written(key, text):
    written = text
    for name in reversed(key.split(".")):
        written = f"{{{name}: {written}}}"
    assert text_layer(written, "x.yaml").values == override(f"{key}={text}").values
    inner = override(f"{key}={text}").values
    for name in key.split("."):
        inner = inner[name]
    assert inner == text
    group, _, rest = key.partition(".")
    whole = rest.replace(".", ": {") + f": {text}" + "}" * rest.count(".")
    assert override(f"{group}={{{whole}}}").values == override(f"{key}={text}").values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {steps: 010}", "x.yaml: run.steps=010: YAML reads the number 8"),
        ("run: {steps: 1:30}", "x.yaml: run.steps=1:30: YAML reads the number 90"),
        ("trainer: {lr: 1:30.5}", "x.yaml: trainer.lr=1:30.5: YAML reads the number 90.5"),
        ("trainer: {betas: [0.9, 1:30]}", r"trainer.betas[1]=1:30: YAML reads the number 90"),
    ],
)
def test_a_number_that_yaml_reads_in_another_base_is_refused(text, said):
    with pytest.raises(ConfigError) as error:
        text_layer(text, "x.yaml")
    assert said in str(error.value)


@given(st.integers(0, 10**6), st.floats(0, 1e6))
def test_other_numbers_are_those_that_are_written(steps, lr):
    values = text_layer(f"run: {{steps: {steps}}}\ntrainer: {{lr: {lr!r}}}", "x.yaml").values
    assert values == {"run": {"steps": steps}, "trainer": {"lr": lr}}


@pytest.mark.parametrize(
    "overrides", ["run.steps=2", {"run.steps": 2}, ["run.steps", 2], None, [None]]
)
def test_overrides_that_are_no_list_of_texts_are_refused_as_such(overrides):
    with pytest.raises(ConfigError, match=r"overrides=.*: expected a list of texts"):
        load({"data": {"url": "d"}, "model": {"path": "m"}}, overrides)


def test_a_seed_that_no_generator_takes_is_refused():
    with pytest.raises(ConfigError, match=r"run\.seed=9223372036854775808"):
        RunConfig(seed=2**63)


def test_an_override_is_what_it_says_whatever_was_done_with_its_values_before():
    text = "cluster.placement.policy=[2]"
    (first,) = _override_layers([text])
    first.values["cluster"]["placement"]["policy"].append(3)
    (second,) = _override_layers([text])
    assert second == override(text)
