"""Edits of a DAG in Python (add, replace, without) equal the by-name edits of its YAML, errors
included.
"""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from siirl_dask.config.file import load_config_file
from siirl_dask.driver.phases import dags
from siirl_dask.errors import PlanError, UserError
from siirl_dask.planner import DAG, Node, Role, Rows

HERE = __name__


def build(device, rank): ...


def build_other(device, rank): ...


def with_text(ctx, table, *, n: int = 1, text: str | None = None): ...


def with_flag(ctx, table, *, n: int = 2, flag: bool = False): ...


def needs_n(ctx, table, *, n: int): ...


FUNCTIONS = {fn.__name__: fn for fn in (with_text, with_flag, needs_n)}
BASE = f"""\
data: {{url: rows}}
model: {{path: model}}
roles:
  r: {{build: "{HERE}:build"}}
  s: {{build: "{HERE}:build"}}
nodes:
  - {{name: one, run: "{HERE}:with_text", role: r, with: {{n: 3, text: x}}}}
  - {{name: two, run: "{HERE}:with_flag", role: s, after: one, rows: grouped, save_as: table}}
  - {{name: three, run: "{HERE}:needs_n", role: r, after: [one, two], with: {{n: 4}}}}
"""
ROLES = (Role("r", build), Role("s", build))
DAG_OF_BASE = DAG(
    ROLES,
    (
        Node("one", with_text, role="r", options={"n": 3, "text": "x"}),
        Node("two", with_flag, role="s", after="one", rows=Rows.GROUPED, save_as="table"),
        Node("three", needs_n, role="r", after=("one", "two"), options={"n": 4}),
    ),
)
DEFAULTS = {"after": (), "rows": Rows.ANYWHERE, "save_as": None, "lag": 0, "reads": None}
"""Values in Python of what null takes away in YAML."""


def in_yaml(fields: dict) -> dict:
    """Spell the fields of a Python edit as YAML does."""
    spelled = {"fn": "run", "options": "with"}
    change = {spelled.get(key, key): value for key, value in fields.items()}
    return change | ({"run": f"{HERE}:{change['run']}"} if "run" in change else {})


def in_python(fields: dict) -> dict:
    """Spell the fields of a YAML edit as Python does."""
    values = {key: DEFAULTS[key] if value is None else value for key, value in fields.items()}
    return values | ({"fn": FUNCTIONS[values["fn"]]} if "fn" in values else {})


def apply(dag: DAG, kind: str, name: str, fields: dict) -> DAG:
    """Make one edit in Python."""
    match kind:
        case "add":
            return dag.add(Node(name, **in_python(fields)))
        case "replace":
            return dag.replace(name, **in_python(fields))
    return dag.without(name)


def load_dag(path) -> DAG:
    return dags(load_config_file(path))[0]


def refusal(edit) -> tuple[object, str]:
    """Return an edit's result, or None and the error without the places that only YAML knows."""
    try:
        return edit(), ""
    except UserError as error:
        return None, re.sub(r"\S+\.yaml:\d+(, over \S+\.yaml:\d+)*: ", "", str(error))


names = st.sampled_from(["one", "two", "three", "four", "five", "thre"])
options = st.fixed_dictionaries(
    {}, optional={"n": st.integers(0, 2), "flag": st.booleans(), "text": st.none() | st.just("y")}
)
changes = {
    "after": st.none() | st.sampled_from(["one", "two"]) | st.lists(names, max_size=3),
    "rows": st.none() | st.sampled_from(["anywhere", "grouped", "balanced", "balancd"]),
    "save_as": st.sampled_from([None, "table", "../up"]),
    "lag": st.sampled_from([None, 0, 1, -1]),
    "reads": st.none() | st.lists(st.sampled_from(["prompt", "reward"]), unique=True, max_size=2),
    "role": st.sampled_from(["r", "r", "s", "t"]),
    "fn": st.sampled_from(sorted(FUNCTIONS)),
    "options": options,
}
new_nodes = st.fixed_dictionaries(
    {"fn": changes["fn"], "role": changes["role"]},
    optional={key: value for key, value in changes.items() if key not in ("fn", "role")},
)
edits = st.one_of(
    st.tuples(st.just("add"), names, new_nodes),
    st.tuples(st.just("replace"), names, st.fixed_dictionaries({}, optional=changes)),
    st.tuples(st.just("without"), names, st.just({})),
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(edits, min_size=1, max_size=5))
def test_edits_in_python_equal_edits_by_name_in_yaml(tmp_path_factory, edited):
    folder = tmp_path_factory.mktemp("edits")
    (folder / "0.yaml").write_text(BASE)
    dag, last = DAG_OF_BASE, "0.yaml"
    for number, (kind, name, fields) in enumerate(edited, 1):
        known = [node.name for node in dag.nodes]
        if (kind == "add") == (name in known):
            continue  # by-name YAML changes a node that is there and adds one that is not
        path = folder / f"{number}.yaml"
        change = None if kind == "without" else in_yaml(fields)
        path.write_text(json.dumps({"base": last, "nodes": {name: change}}))
        made, said = refusal(partial(apply, dag, kind, name, fields))
        spelled, said_of_yaml = refusal(partial(load_dag, path))
        assert said == said_of_yaml
        assert made == spelled
        if made is not None:
            dag, last = made, path.name


def test_none_takes_away_an_option_that_a_node_has(write):
    write(BASE, "base.yaml")
    spelled, _ = dags(load_config_file(write("base: base.yaml\nnodes: {one: {with: {n: null}}}\n")))
    assert DAG_OF_BASE.replace("one", options={"n": None}) == spelled
    assert spelled.node("one").options == {"text": "x"}
    for edit in (
        lambda: DAG_OF_BASE.replace("three", options={"n": None}),
        lambda: dags(
            load_config_file(write("base: base.yaml\nnodes: {three: {with: {n: null}}}\n"))
        ),
    ):
        assert refusal(edit)[1].startswith("node 'three' needs the option 'n'")


@pytest.mark.parametrize(("kind", "change"), [("without", "null"), ("replace", "{rows: balanced}")])
def test_an_edit_of_a_node_that_is_not_there_is_refused_alike(write, kind, change):
    write(BASE, "base.yaml")
    file = write(f"base: base.yaml\nnodes: {{thre: {change}}}\n")
    _, in_text = refusal(lambda: load_config_file(file))
    _, said = refusal(lambda: apply(DAG_OF_BASE, kind, "thre", {}))
    for text in (in_text, said):
        assert text.startswith("node 'thre' is none of ")
        assert "(nodes: ['one', 'two', 'three'])" in text
        assert text.endswith("did you mean 'three'?")


def test_a_field_that_there_is_not_is_refused_with_the_nearest_one(write):
    write(BASE, "base.yaml")
    with pytest.raises(
        PlanError, match=r"node 'two' has an unknown key 'save_ass' .*; did you mean 'save_as'\?"
    ):
        dags(load_config_file(write("base: base.yaml\nnodes: {two: {save_ass: x}}\n")))
    with pytest.raises(
        PlanError, match=r"node 'two' has no field 'save_ass' .*; did you mean 'save_as'\?"
    ):
        DAG_OF_BASE.replace("two", save_ass="x")


def test_a_role_of_the_same_name_takes_the_place_of_the_old_one(write):
    write(BASE, "base.yaml")
    spelled, _ = dags(
        load_config_file(write(f"base: base.yaml\nroles: {{r: {{build: '{HERE}:build_other'}}}}\n"))
    )
    assert DAG_OF_BASE.add(roles=[Role("r", build_other)]) == spelled != DAG_OF_BASE


def test_a_node_that_is_there_cannot_be_added_again():
    with pytest.raises(PlanError, match="node 'one' is there twice"):
        DAG_OF_BASE.add(Node("one", with_text, role="r"))


def test_an_edit_leaves_the_dag_as_it_was():
    before = DAG(DAG_OF_BASE.roles, DAG_OF_BASE.nodes)
    DAG_OF_BASE.add(Node("four", with_text, role="r", after="three"))
    DAG_OF_BASE.replace("one", options={"n": 9})
    DAG_OF_BASE.without("three")
    assert before == DAG_OF_BASE
    assert DAG_OF_BASE.node("one").options == {"n": 3, "text": "x"}


def test_rows_may_be_given_by_name_and_a_misspelled_one_is_refused():
    assert Node("x", with_text, role="r", after="one", rows="balanced").rows is Rows.BALANCED
    with pytest.raises(
        PlanError,
        match=r"node 'x' has rows='balancd': expected one of .*; did you mean 'balanced'\?",
    ):
        Node("x", with_text, role="r", after="one", rows="balancd")
