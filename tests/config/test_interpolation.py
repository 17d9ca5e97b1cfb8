"""Interpolations are OmegaConf's, whoever follows them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from siirl_dask.config.file import load_config_file, shipped_files
from siirl_dask.config.file.interpolation import Interpolations
from siirl_dask.errors import ConfigError


def values(names):
    """Plain data with interpolations of these names in every form, and with none."""
    name = st.sampled_from(names)
    pair = st.tuples(name, name)
    texts = st.one_of(
        name.map("${{{}}}".format),
        pair.map("x${{{0[0]}}}y ${{{0[1]}}}".format),
        pair.map("${{{0[0]}.${{{0[1]}}}}}".format),
        name.map("\\${{{}}}".format),
        name.map("${{oc.select:{},3}}".format),
        st.sampled_from(
            ["", "x", "$", "${", "}", "???", "1e-4", "true", "null", "${ b }", "$${b}"]
        ),
        st.sampled_from(["", "x", "$", "\\", "\\\\"]).flatmap(
            lambda before: st.sampled_from(["TEXT", "INTERPOLATION", "MISSING", "ABSENT"]).map(
                lambda variable: f"{before}${{oc.env:{variable}}}"
            )
        ),
        st.sampled_from(["\\\\${b}", "x${oc.env:TEXT}\\${b}", "$\\${{b}"]),
    )
    plain = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 1e-5]))
    return st.recursive(
        plain | texts,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["a", "b", "c", 0]), inner, max_size=3),
        ),
        max_leaves=8,
    )


# a names b, b names c: a circle costs OmegaConf a second, so two are examples
PARTS = st.fixed_dictionaries(
    {
        "a": values(["b", "c", "b.c", "b.a.c", "b[0]", "b.0", "c.a", "d"]),
        "b": values(["c", "c.a", "c[0].b", "d.c"]),
        "c": values(["d", "d.a"]),
    }
)


@pytest.fixture(scope="module")
def variables():
    """Variables of the environment: a text, one that looks like a reference, one like a missing
    value.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TEXT", "a text")
        environment.setenv("INTERPOLATION", "${b}")
        environment.setenv("MISSING", "???")
        environment.delenv("ABSENT", raising=False)
        yield


def answer(resolve, name):
    try:
        return resolve(name, "run.yaml")
    except ConfigError as error:
        return str(error)


@example({"a": "${b}", "b": "${a}"})
@example({"a": {"b": "${.c}", "c": 1}})
@example({"a": {"b": "${a.c}", "c": ["${b.a}"]}, "b": {"a": True}})
@example({"a": "${b.c}", "b": {"c": "\\${a}"}})
@example({"a": "x${b.c}", "b": {"c": "\\${a}${oc.env:TEXT}"}})
@example({"a": "${b.c}", "b": {"c": "${oc.env:INTERPOLATION}", "d": "${oc.env:MISSING}"}})
@given(PARTS)
def test_every_part_resolves_to_what_omegaconf_makes_of_it(variables, parts):
    here = Interpolations(parts)
    try:
        OmegaConf.create(parts)
    except OmegaConfBaseException:
        return  # nor can it read a file with such a text
    wanted = {name: answer(here._by_omegaconf, name) for name in parts}
    assert repr({name: answer(here.resolved, name) for name in parts}) == repr(wanted)


@pytest.mark.parametrize("name", sorted(shipped_files()))
def test_shipped_configs_are_what_omegaconf_makes_of_them(name, monkeypatch):
    path = shipped_files()[name]
    overrides = ["run.url=/tmp/run", "data.url=/tmp/rows.parquet", "model.path=/tmp/model"]
    followed = load_config_file(path, overrides)
    monkeypatch.setattr(Interpolations, "resolved", Interpolations._by_omegaconf)
    assert load_config_file(path, overrides) == followed


def test_a_text_that_refers_to_no_other_value_needs_no_other(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(Interpolations, "_by_omegaconf", lambda *_: pytest.fail("wraps all values"))
    here = Interpolations(
        {"a": {"b": "${oc.env:HOME}/x", "c": r"\${x}", "d": ["${a.b}", "${a.c}"]}}
    )
    assert here.resolved("a", "run.yaml") == {
        "b": "/home/me/x",
        "c": "${x}",
        "d": ["/home/me/x", "${x}"],
    }


def test_a_part_is_a_copy_that_callers_may_change():
    parts = {"a": {"b": [1]}, "b": {"c": "${a}"}}
    interpolations = Interpolations(parts)
    interpolations.resolved("b", "run.yaml")["c"]["b"].append(2)
    interpolations.resolved("a", "run.yaml")["b"].append(2)
    assert parts == {"a": {"b": [1]}, "b": {"c": "${a}"}}
