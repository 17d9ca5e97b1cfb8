"""The nodes of a config: a list replaces the base's, a mapping changes it, and errors say which
line is meant.
"""

from __future__ import annotations

import copy
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError, PlanError

NEEDED = "data: {url: rows}\nmodel: {path: model}\n"
BASE = """\
data: {url: rows}
model: {path: model}
nodes:
  - name: one
    run: m:f
    role: r
    with: {a: 1, b: {x: 1, y: 2}}
  - {name: two, run: "m:g", role: r, after: one, rows: grouped, save_as: table}
validation_nodes: [{name: one, run: "m:f", role: r}]
"""


@pytest.fixture
def write(write):
    """There is a ``base.yaml``."""
    write(BASE, "base.yaml")
    return write


def nodes(write, text, *overrides, part="nodes"):
    file = load_config_file(write(f"base: base.yaml\n{text}\n"), overrides)
    return {node["name"]: node for node in getattr(file, part)}


ONE = {"name": "one", "run": "m:f", "role": "r", "with": {"a": 1, "b": {"x": 1, "y": 2}}}
TWO = {
    "name": "two",
    "run": "m:g",
    "role": "r",
    "after": "one",
    "rows": "grouped",
    "save_as": "table",
}
CHANGES = {
    "nothing": ("nodes: {}", [], [ONE, TWO]),
    "a key": ("nodes: {two: {rows: balanced}}", [], [ONE, {**TWO, "rows": "balanced"}]),
    "an option": (
        "nodes: {one: {with: {a: 2}}}",
        [],
        [{**ONE, "with": {**ONE["with"], "a": 2}}, TWO],
    ),
    "an option is a value": (
        "nodes: {one: {with: {b: {x: 5}}}}",
        [],
        [{**ONE, "with": {"a": 1, "b": {"x": 5}}}, TWO],
    ),
    "the function, with its options": (
        "nodes: {one: {run: 'm:h'}}",
        [],
        [{**ONE, "run": "m:h"}, TWO],
    ),
    "first options": ("nodes: {two: {with: {n: 3}}}", [], [ONE, {**TWO, "with": {"n": 3}}]),
    "null takes a node away": (
        "nodes: {one: null, two: {after: null}}",
        [],
        [{k: TWO[k] for k in TWO if k != "after"}],
    ),
    "null takes a key away": (
        "nodes: {two: {save_as: null}}",
        [],
        [ONE, {k: TWO[k] for k in TWO if k != "save_as"}],
    ),
    "null takes an option away": (
        "nodes: {one: {with: {b: null}}}",
        [],
        [{**ONE, "with": {"a": 1}}, TWO],
    ),
    "null of a new option is its value": (
        "nodes: {two: {with: {n: null}}}",
        [],
        [ONE, {**TWO, "with": {"n": None}}],
    ),
    "a new node": (
        "nodes: {three: {run: 'm:h', role: r, after: [one]}}",
        [],
        [ONE, TWO, {"name": "three", "run": "m:h", "role": "r", "after": ["one"]}],
    ),
    "a list replaces": ("nodes: [{name: other}]", [], [{"name": "other"}]),
    "the command line": ("", ["nodes.two.rows=balanced"], [ONE, {**TWO, "rows": "balanced"}]),
    "an option of the command line": (
        "",
        ["nodes.one.with.a=64"],
        [{**ONE, "with": {**ONE["with"], "a": 64}}, TWO],
    ),
    "a longer key goes deeper": (
        "",
        ["nodes.one.with.b.x=9"],
        [{**ONE, "with": {"a": 1, "b": {"x": 9, "y": 2}}}, TWO],
    ),
    "a mapping on the command line": (
        "",
        ["nodes={two: {save_as: null}}", "nodes.two.save_as=t"],
        [ONE, {**TWO, "save_as": "t"}],
    ),
    "a node away on the command line": ("", ["nodes.two=null"], [ONE]),
    "a new node on the command line": (
        "",
        ["nodes.three={run: m:h, role: r}"],
        [ONE, TWO, {"name": "three", "run": "m:h", "role": "r"}],
    ),
    "one over the other": (
        "nodes: {one: {with: {a: 2}}}",
        ["nodes.one.with.a=3", "nodes.one.with.c=4"],
        [{**ONE, "with": {"a": 3, "b": {"x": 1, "y": 2}, "c": 4}}, TWO],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_of_the_base(write, case):
    text, overrides, expected = CHANGES[case]
    assert list(nodes(write, text, *overrides).values()) == expected


def test_validation_nodes_are_changed_alike(write):
    found = nodes(
        write,
        "validation_nodes: {one: {save_as: v}}",
        "validation_nodes.one.rows=anywhere",
        part="validation_nodes",
    )
    assert found == {
        "one": {"name": "one", "run": "m:f", "role": "r", "save_as": "v", "rows": "anywhere"}
    }
    assert list(nodes(write, "validation_nodes: {one: {save_as: v}}").values()) == [ONE, TWO]


def test_nodes_may_be_a_mapping_from_the_start(write):
    file = load_config_file(
        write(NEEDED + "nodes:\n  a: {run: 'm:f', role: r}\n  b: {run: 'm:g', role: r, after: a}\n")
    )
    assert [node["name"] for node in file.nodes] == ["a", "b"]
    assert file.node_places == ["run.yaml:4", "run.yaml:5"]


def test_interpolation_sees_the_changed_nodes_and_the_values(write):
    text = (
        'rollout: {n: 7}\nnodes: {one: {with: {a: "${rollout.n}"}}}\nvalidation_nodes: "${nodes}"'
    )
    file = load_config_file(
        write(f"base: base.yaml\n{text}\n"), ["nodes.two.save_as=other", "rollout.n=9"]
    )
    assert file.nodes[0]["with"]["a"] == 9
    assert file.nodes[1]["save_as"] == "other"
    assert file.validation_nodes == file.nodes
    assert file.validation_node_places == ["run.yaml:4", "run.yaml:4"]


def test_anchors_and_merge_keys(write):
    text = """
nodes:
  one: &changed
    rows: grouped
    with: &options {a: 3}
  two: {<<: *changed, save_as: null, with: {<<: *options, c: 1}}
validation_nodes: {<<: {one: *changed}}
"""
    file = load_config_file(write(f"base: base.yaml{text}"))
    one, two = file.nodes
    assert (one["rows"], one["with"]["a"], one["with"]["b"]) == ("grouped", 3, {"x": 1, "y": 2})
    assert two == {
        "name": "two",
        "run": "m:g",
        "role": "r",
        "after": "one",
        "rows": "grouped",
        "with": {"a": 3, "c": 1},
    }
    assert file.validation_nodes[0]["with"] == {"a": 3}
    assert file.node_places == ["run.yaml:3, over base.yaml:4", "run.yaml:6, over base.yaml:8"]
    assert file.validation_node_places == ["run.yaml:7, over base.yaml:9"]


REFUSED = [
    ("nodes: {tow: {rows: grouped}}", [], ["run.yaml:2: node 'tow' is none of those before it (nodes: ['one', 'two'])",
                                           "a new node needs run and role; did you mean 'two'?"]),
    ("nodes:\n  three: {run: 'm:f'}", [], ["run.yaml:3: node 'three'", "a new node needs role"]),
    ("nodes:\n\n  tow: null", [], ["run.yaml:4: node 'tow'", "nothing to remove; did you mean 'two'?"]),
    ("nodes: {one: 5}", [], ["run.yaml:2: node 'one' is 5: expected a mapping of what to change, or null to"]),
    ("nodes: {one: {name: two}}", [], ["run.yaml:2: node 'one' has name='two': expected the name it is written under"]),
    ("nodes: 5", [], ["run.yaml: nodes=5: expected a list"]),
    ("", ["nodes.tow.rows=grouped"], ["override 'nodes.tow.rows=grouped': node 'tow'", "did you mean 'two'?"]),
    ("", ["nodes.one=5"], ["override 'nodes.one=5': node 'one' is 5"]),
    ("", ["roles.r.build=x"], ["'roles' is for files only"]),
    ("", ["nodes.one.with.a=${rollout.m}"], ["nodes[0].with.a: Interpolation key 'rollout.m' not found"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "parts"), REFUSED)
def test_refused(write, text, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        nodes(write, text, *overrides)
    for part in parts:
        assert part in str(caught.value)


def test_nodes_by_name_need_a_list_to_be_over(write):
    write(BASE.replace("validation_nodes: [", 'validation_nodes: "${nodes}" # ['), "base.yaml")
    with pytest.raises(
        ConfigError, match=r"run.yaml:2: validation_nodes gives nodes by name, .* are '\$\{nodes\}'"
    ):
        load_config_file(write("base: base.yaml\nvalidation_nodes: {one: {save_as: v}}\n"))


LINES = [
    # what is written over the quickstart, and the error with the line of the first column
    ("nodes:\n  update:\n    rows: balancd\n", 3, "node 'update' has rows='balancd'"),
    (
        "\nnodes: {advantage: {after: [rewrd]}}\n",
        3,
        "node 'advantage' comes after 'rewrd', which is no node",
    ),
    ("nodes: {reward: {role: polcy}}\n", 2, "node 'reward' has role 'polcy', which no role binds"),
    (
        "nodes: {reward: {run: 'siirl_dask.nodes:scre'}}\n",
        2,
        "node 'reward': 'siirl_dask.nodes:scre': module",
    ),
    (
        "nodes:\n  - {name: a, run: 'siirl_dask.nodes:score', role: reward}\n  - name: b\n    rn: "
        "x\n",
        4,
        "node 'b' has an",
    ),
    ("nodes: {rollout: {with: {rollout: null}}}\n", 2, "node 'rollout' needs the option 'rollout'"),
    (
        "roles:\n  rollout: {build: 'siirl_dask.rollout:build_engin'}\n",
        3,
        "role 'rollout': 'siirl_dask.rollout:build_",
    ),
    ("validation_nodes:\n\n  reward: {after: rolout}\n", 4, "node 'reward' comes after 'rolout'"),
]


@pytest.mark.parametrize(("text", "line", "said"), LINES)
def test_errors_of_the_dag_name_the_file_and_the_line(tmp_path, text, line, said):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {shipped('quickstart.yaml')}\n{text}")
    with pytest.raises(
        PlanError, match=rf"^{re.escape(str(path))}:{line}(, over .*)?: .*"
    ) as caught:
        dags(load_config_file(path))
    assert said in str(caught.value)


def test_a_node_that_is_changed_names_both_lines(tmp_path):
    base, path = shipped("dags/grpo.yaml"), tmp_path / "mine.yaml"
    path.write_text(
        f"base: {shipped('quickstart.yaml')}\nnodes: {{update: {{with: {{minibatch: 2}}}}}}\n"
    )
    there = base.read_text().splitlines().index("  - name: update") + 1
    said = (
        f"{path}:2, over {base.parent}/{base.name}:{there}: node 'update' has no option 'minibatch'"
    )
    with pytest.raises(PlanError, match=re.escape(said)):
        dags(load_config_file(path))


names = st.sampled_from(["one", "two", "three"])
values = st.one_of(
    st.integers(), st.none(), st.dictionaries(st.sampled_from("xy"), st.integers(), max_size=2)
)
changes = st.dictionaries(
    names,
    st.none()
    | st.fixed_dictionaries(
        {"run": st.just("m:n"), "role": st.just("r")},
        optional={
            "rows": st.sampled_from(["balanced", None]),
            "with": st.dictionaries(st.sampled_from("abc"), values),
        },
    ),
)


@given(st.lists(changes, max_size=4))
def test_layers_of_changes_are_what_they_are_one_by_one(tmp_path_factory, layers):
    """The model: a dict of nodes in order, changed by one layer after the other."""
    folder = tmp_path_factory.mktemp("layers")
    (folder / "0.yaml").write_text(BASE)
    expected = {node["name"]: copy.deepcopy(node) for node in (ONE, TWO)}
    for number, layer in enumerate(layers, 1):
        layer = {
            name: change for name, change in layer.items() if change is not None or name in expected
        }
        (folder / f"{number}.yaml").write_text(
            yaml.safe_dump({"base": f"{number - 1}.yaml", "nodes": layer})
        )
        for name, change in sorted(layer.items()):  # as yaml.safe_dump writes them
            change_one(expected, name, change)
    assert load_config_file(folder / f"{len(layers)}.yaml").nodes == list(expected.values())


def change_one(expected, name, change):
    if change is None:
        del expected[name]
    elif name not in expected:
        expected[name] = {"name": name, **change}
    else:
        for key, value in change.items():
            old = expected[name].get(key)
            if key == "with" and isinstance(old, dict):
                for option, given_value in value.items():
                    if given_value is None and option in old:
                        del old[option]
                    else:
                        old[option] = given_value
            elif value is None and key in expected[name]:
                del expected[name][key]
            else:
                expected[name][key] = value
