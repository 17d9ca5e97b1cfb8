"""YAML of other systems is read without the environment of whoever reads it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.config.file import foreign_value, foreign_values, load, load_text
from siirl_dask.errors import ConfigError

SECRET = "hunter2"
LINKS = ["${%s}", "x-${%s}", "${oc.select:%s}", "${oc.decode:${%s}}", "${oc.decode:'${%s}'}"]
DEPTHS = [80, 400]


@settings(max_examples=40)
@given(links=st.lists(st.sampled_from(LINKS), max_size=6), within=st.sampled_from(["%s", "[%s]"]))
def test_no_chain_of_interpolations_asks_for_the_environment(links, within):
    text = 'key0: "${oc.env:SIIRL_TEST_SECRET}"\n'
    for number, link in enumerate(links):
        value = json.dumps(link % f"key{number}")
        text += f"key{number + 1}: {within % value}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIIRL_TEST_SECRET", SECRET)
        values = foreign_values(text, "theirs.yaml")
    assert SECRET not in json.dumps(values)
    assert values["key0"] == "${oc.env:SIIRL_TEST_SECRET}"


def test_all_other_interpolations_are_resolved():
    text = 'n: 5\nm: ${n}\nhome: "${oc.env:HOME}/x"\ndata: {url: "${home}"}\nplain: \'\\${n}\'\n'
    assert foreign_values(text, "theirs.yaml") == {
        "n": 5,
        "m": 5,
        "home": "${oc.env:HOME}/x",
        "data": {"url": "${oc.env:HOME}/x"},
        "plain": "${n}",
    }


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("begin", ["[", "{a: "])
def test_values_that_are_nested_too_deep_are_an_error_of_the_file(begin, depth):
    end = {"[": "]", "{a: ": "}"}[begin]
    nested = begin * depth + end * depth
    with pytest.raises(ConfigError, match=r"theirs.yaml.*(too deep|depth)|unknown key"):
        load_text(f"trainer: {{deep: {nested}}}\n", "theirs.yaml")
    with pytest.raises(ConfigError, match=r"trainer.lr"):
        load("siirl_dask:dags/grpo.yaml", [f"trainer.lr={nested}", "data.url=d", "model.path=m"])
    foreign_value(nested)  # a text where it is no list
    if depth > min(DEPTHS):
        with pytest.raises(ConfigError, match=r"theirs.yaml.*(recursion|depth)"):
            foreign_values(f"deep: {nested}\n", "theirs.yaml")
