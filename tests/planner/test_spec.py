"""The same DAG from YAML and from Python is equal and hashes equal; what YAML gets wrong is
refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pytest
from omegaconf import OmegaConf

from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    Node,
    Role,
    Rows,
    columns,
    dag_from_spec,
    dag_to_spec,
    resolve,
    trace_columns,
)
from siirl_dask.schema import fields

if TYPE_CHECKING:
    from nowhere import Nothing

HERE = __name__


class Kind(StrEnum):
    fast = "fast"
    slow = "slow"


@dataclass(frozen=True)
class Options:
    lr: float
    kind: Kind = Kind.slow
    betas: tuple[float, float] = (0.9, 0.99)


class Score(Protocol):
    def __call__(self, response: str) -> float: ...


class Engine:
    def __init__(self, device: object, rank: object, *, options: Options) -> None: ...


def build(device, rank, *, options: Options): ...


@columns(reads=["prompt"], writes=fields("response"), expand="n")
def generate(ctx, table, n: int = 1): ...


@columns(reads=["response"], writes=fields("reward"))
def score(
    ctx: Nothing,  # evaluated for no option
    table,
    *,
    reward: Callable[..., float],
    rewards: list[Callable[..., float]] | None = None,
    protocol: Score | None = None,
    anything: Any = None,
    scale: float = 1.0,
): ...


def undeclared(ctx, table, *, of: Nothing = None): ...


def exact(response): ...


def within(response, *, margin: float): ...


YAML = f"""
roles:
  policy:
    build: {HERE}:build
    with: {{options: {{lr: 1, kind: fast, betas: [0, 0.5]}}}}
  rollout:
    build: {HERE}:Engine
    with: {{options: {{lr: 0.5}}}}
nodes:
  - {{name: rollout, run: "{HERE}:generate", role: rollout, with: {{n: 8}}}}
  - name: reward
    run: {HERE}:score
    role: rollout
    after: rollout
    save_as: rollouts
    with:
      reward: {{run: "{HERE}:within", with: {{margin: 1}}}}
      rewards: ["{HERE}:exact", "math:sqrt"]
      protocol: {HERE}:exact
      scale: 2
  - name: other
    run: {HERE}:undeclared
    role: policy
    after: [reward]
    rows: balanced
    reads: [reward, response]
    writes: {{score: float32, ids: list<int32>}}
"""


def in_python() -> DAG:
    reward = partial(
        score,
        reward=partial(within, margin=1.0),
        rewards=[exact, math.sqrt],
        protocol=exact,
        scale=2.0,
    )
    made = pa.schema({"score": pa.float32(), "ids": pa.list_(pa.int32())})
    options = Options(lr=1.0, kind=Kind.fast, betas=(0.0, 0.5))
    return DAG(
        (
            Role("policy", partial(build, options=options)),
            Role("rollout", partial(Engine, options=Options(lr=0.5))),
        ),
        (
            Node("rollout", partial(generate, n=8), role="rollout"),
            Node("reward", reward, role="rollout", after="rollout", save_as="rollouts"),
            Node(
                "other",
                undeclared,
                role="policy",
                after="reward",
                rows=Rows.BALANCED,
                save_as=None,
                reads=("reward", "response"),
                writes=made,
            ),
        ),
    )


def parse(text: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.create(text))


def test_yaml_and_python_are_equal():
    dag = dag_from_spec(**parse(YAML))
    assert dag == in_python()
    assert hash(dag) == hash(in_python())


def test_options_have_the_types_that_are_annotated():
    dag = dag_from_spec(**parse(YAML))
    options = dag.roles[0].build.keywords["options"]
    assert options == Options(lr=1.0, kind=Kind.fast, betas=(0.0, 0.5))
    assert isinstance(options.lr, float)
    assert isinstance(options.kind, Kind)
    assert isinstance(options.betas, tuple)
    reward = dag.node("reward").options
    assert reward["rewards"] == [exact, math.sqrt]
    assert reward["protocol"] is exact
    assert reward["reward"].func is within


def test_round_trip():
    dag = in_python()
    spec = dag_to_spec(dag)
    again = dag_from_spec(**spec)
    assert again == dag
    assert hash(again) == hash(dag)
    assert dag_to_spec(again) == spec
    assert dag_from_spec(**parse(OmegaConf.to_yaml(OmegaConf.create(spec)))) == dag
    assert [n.contract for n in again.nodes] == [n.contract for n in dag.nodes]


def test_round_trip_of_functions_in_options_without_annotation():
    dag = DAG(
        [Role("r", exact)],
        [Node("a", partial(score, reward=exact, anything={"x": [exact]}), role="r")],
    )
    again = dag_from_spec(**dag_to_spec(dag))
    assert again == dag
    assert again.nodes[0].options["anything"] == {"x": [exact]}


def test_round_trip_of_grpo(grpo):
    assert dag_from_spec(**dag_to_spec(grpo)) == grpo


def edit(path: str, value: Any) -> dict[str, Any]:
    spec = parse(YAML)
    *parents, last = path.split(".")
    at = spec
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[int(last) if isinstance(at, list) else last] = value
    return spec


REFUSED = [
    ("nodes.0.run", "generate", "'generate' names no function: expected 'module:function'"),
    ("nodes.0.run", "no.such:f", "'no.such:f': there is no module 'no.such' on the Python path"),
    ("nodes.0.run", f"{HERE}:genrate", "has no function 'genrate'; did you mean 'generate'?"),
    ("nodes.0.run", None, "node 'rollout' has run=None: expected name, run and role"),
    ("nodes.0.name", 7, "node 7 has name=7: expected name, run and role, each a text"),
    ("nodes.0", "rollout", "node 0 is 'rollout': expected a mapping with name, run and role"),
    ("nodes.0.afer", [], "node 'rollout' has an unknown key 'afer'"),
    ("nodes.0.afer", [], "did you mean 'after'?"),
    ("nodes.0.with", [1], "node 'rollout' has with=[1]: expected a mapping of options"),
    ("nodes.0.with.m", 1, "node 'rollout' has no option 'm' (options: ['n'])"),
    ("nodes.0.with.n", "x", "node 'rollout': n='x': expected a whole number (int)"),
    ("nodes.0.with.n", None, "node 'rollout': n=None: expected a whole number (int)"),
    ("nodes.0.with.n", True, "node 'rollout': n=True: expected a whole number (int)"),
    ("nodes.1.with", {}, "node 'reward' needs the option 'reward': give it under 'with'"),
    ("nodes.1.with.rewrd", 1, "did you mean 'reward'?"),
    (
        "nodes.1.with.reward.wth",
        {},
        "node 'reward': reward has an unknown key 'wth' (keys: ['run', 'with'])",
    ),
    ("nodes.1.with.reward", {"with": {}}, "'' names no function"),
    ("nodes.1.with.reward.with", {}, "node 'reward': reward needs the option 'margin'"),
    ("nodes.1.rows", "balancd", "node 'reward' has rows='balancd': expected one of"),
    ("nodes.1.rows", "balancd", "did you mean 'balanced'?"),
    ("nodes.1.after", 5, "node 'reward': after=5: expected a name or a list of names"),
    ("nodes.1.after", [5], "node 'reward': after=[5]: expected a name or a list of names"),
    ("nodes.1.save_as", True, "save_as of node 'reward': True is no usable name"),
    (
        "nodes.1.with.protocol",
        {"run": None, "with": {"margin": 1}},
        "node 'reward': protocol: None names no function",
    ),
    ("nodes.2.reads", {"a": 1}, "node 'other': reads={'a': 1}: expected a name or a list of names"),
    (
        "nodes.2.writes",
        {"a": "flot"},
        "node 'other': writes={'a': 'flot'}: expected columns and Arrow types",
    ),
    ("nodes.2.writes", ["a"], "node 'other': writes=['a']: expected columns and Arrow types"),
    (
        "nodes.2.with",
        {"of": 1},
        "node 'other': the annotation of an option needs an import at run time",
    ),
    ("roles.policy", "x", "role 'policy' is 'x': expected {build: 'module:function', with: {...}}"),
    (
        "roles.policy.biuld",
        "x",
        "role 'policy' has an unknown key 'biuld' (keys: ['build', 'with']); did you mean 'build'?",
    ),
    ("roles.policy.with.options", {}, "role 'policy': options lacks ['lr'], which Options needs"),
    (
        "roles.policy.with.options.l",
        1,
        "role 'policy': options has an unknown key 'l' (keys: ['lr', 'kind', 'betas'])",
    ),
    (
        "roles.policy.with.options.lr",
        "x",
        "role 'policy': options.lr='x': expected a number (float)",
    ),
    (
        "roles.policy.with.options.kind",
        "fst",
        "options.kind='fst': expected one of ['fast', 'slow']; did you mean 'fast'?",
    ),
]


@pytest.mark.parametrize(("path", "value", "text"), REFUSED)
def test_refused(path, value, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        dag_from_spec(**edit(path, value))


def test_an_import_error_inside_the_users_module_is_shown(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        PlanError,
        match=r"'broken_rewards:f': importing it fails at .*broken_rewards.py:1: .*not_inst",
    ) as caught:
        resolve("broken_rewards:f")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_call_of_nothing_is_none_where_none_will_do():
    nothing = {"run": None, "with": {}}
    dag = dag_from_spec(**edit("nodes.1.with.protocol", nothing))
    assert dag.node("reward").options["protocol"] is None
    with pytest.raises(PlanError, match="node 'reward': reward: None names no function"):
        dag_from_spec(**edit("nodes.1.with.reward", nothing))


def test_errors_say_where_a_role_or_node_is_written():
    places = {
        "role_places": {"policy": "x.yaml:3"},
        "node_places": ["x.yaml:9", "x.yaml:12", "x.yaml:20"],
    }
    for path, value, text in [
        ("roles.policy.biuld", "x", "x.yaml:3: role 'policy' has an unknown key 'biuld'"),
        ("roles.policy.build", "x", "x.yaml:3: role 'policy': 'x' names no function"),
        ("nodes.0.run", f"{HERE}:genrate", f"x.yaml:9: node 'rollout': '{HERE}:genrate': module"),
        ("nodes.0", "rollout", "x.yaml:9: node 0 is 'rollout'"),
        ("nodes.1.with", {}, "x.yaml:12: node 'reward' needs the option 'reward'"),
        ("nodes.1.role", "polcy", "x.yaml:12: node 'reward' has role 'polcy', which no role binds"),
        (
            "nodes.2.after",
            ["rewrd"],
            "x.yaml:20: node 'other' comes after 'rewrd', which is no node",
        ),
        (
            "nodes.2.after",
            ["reward", "reward"],
            "parent of x.yaml:20: node 'other': 'reward' is there twice",
        ),
        ("nodes.2.name", "reward", "x.yaml:20: node 'reward' is there twice"),
        ("nodes.2.name", "a.b", "x.yaml:20: node 'a.b' is no usable name"),
    ]:
        with pytest.raises(PlanError, match=f"^{re.escape(text)}"):
            dag_from_spec(**edit(path, value), **places)
    with pytest.raises(PlanError, match=r"^x\.yaml:20: node 'other' reads"):
        trace_columns(
            dag_from_spec(**edit("nodes.2.reads", ["respnse"]), **places),
            pa.schema({"prompt": pa.string()}),
        )
