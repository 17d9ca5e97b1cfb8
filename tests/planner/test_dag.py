"""A DAG that does not hold together is refused, naming node, column and the nearest spelling."""

from __future__ import annotations

import re
from functools import partial

import pyarrow as pa
import pytest

from siirl_dask.errors import PlanError
from siirl_dask.planner import DAG, Node, Role, Rows, columns, trace_columns
from siirl_dask.schema import fields

SOURCE = pa.schema({"prompt": pa.string(), "answer": pa.string()})


def build(device, rank): ...


@columns(reads=["prompt"], writes=fields("response"))
def answer(ctx, table, *, n: object = None): ...


@columns(reads=["reponse"], writes=fields("reward"))
def misreads(ctx, table): ...


@columns(writes={"x": pa.int32()})
def write_x(ctx, table): ...


@columns(new_rows=True)
def fresh(ctx, table): ...


@columns(writes=fields("tokens"))
def recount(ctx, table): ...


def plain(ctx, table): ...


class Holder:
    def method(self, ctx, table): ...

    def __call__(self, ctx, table): ...


ROLES = (Role("policy", build), Role("rollout", build))


def node(name: str, *after: str, fn=plain, **more) -> Node:
    return Node(name, fn, role="policy", after=after, **more)


def nested():
    def inner(ctx, table): ...

    return inner


REFUSED = {
    "unknown role": (
        lambda: DAG(ROLES, [Node("a", plain, role="polcy")]),
        "node 'a' has role 'polcy', which no role binds (roles: ['policy', 'rollout']); did you "
        "mean 'policy'?",
    ),
    "unknown parent": (
        lambda: DAG(ROLES, [node("reward"), node("b", "rewrd")]),
        "node 'b' comes after 'rewrd', which is no node (nodes: ['b', 'reward']); did you mean "
        "'reward'?",
    ),
    "double node": (lambda: DAG(ROLES, [node("a"), node("a")]), "node 'a' is there twice"),
    "double role": (
        lambda: DAG((*ROLES, Role("policy", build)), [node("a")]),
        "role 'policy' is there twice",
    ),
    "double parent": (
        lambda: DAG(ROLES, [node("a"), node("b", "a", "a")]),
        "parent of node 'b': 'a' is there twice",
    ),
    "no nodes": (lambda: DAG(ROLES, []), "the DAG has no nodes"),
    "cycle": (
        lambda: DAG(
            ROLES, [node("a"), node("b", "a", "d"), node("c", "b"), node("d", "c"), node("e", "d")]
        ),
        "the nodes make a cycle: b -> c -> d -> b",
    ),
    "own parent": (lambda: DAG(ROLES, [node("a", "a")]), "the nodes make a cycle: a -> a"),
    "name": (lambda: node("a->b"), "node 'a->b' is no usable name"),
    "empty name": (lambda: node(""), "node '' is no usable name"),
    "name is a number": (lambda: node(3), "node 3 is no usable name"),
    "role name": (lambda: Role("a.b", build), "role 'a.b' is no usable name"),
    "keep": (lambda: node("a", save_as="../up"), "save_as of node 'a': '../up' is no usable name"),
    "rows of an entry": (
        lambda: node("a", rows=Rows.GROUPED),
        "node 'a' has rows='grouped' and no parents",
    ),
    "identity": (lambda: node("a", fn=recount), "node 'a' writes ['tokens'] of rows that exist"),
    "lambda": (
        lambda: node("a", fn=lambda ctx, table: table),
        "is a lambda or a nested function: define it with def",
    ),
    "nested": (
        lambda: node("a", fn=nested()),
        "nested.<locals>.inner is a lambda or a nested function",
    ),
    "method": (
        lambda: node("a", fn=Holder().method),
        "Holder.method is a method or a nested class",
    ),
    "callable object": (lambda: node("a", fn=Holder()), "is not a module-level function"),
    "role lambda": (
        lambda: Role("policy", lambda device, rank: None),
        "is a lambda or a nested function",
    ),
    "positional": (
        lambda: hash(node("a", fn=partial(answer, 1))),
        "has positional arguments: name them",
    ),
    "option": (
        lambda: hash(node("a", fn=partial(answer, n=object()))),
        "a value of type object cannot be part of a DAG",
    ),
    "missing column": (
        lambda: trace_columns(
            DAG(ROLES, [node("a", fn=answer), node("score", "a", fn=misreads)]), SOURCE
        ),
        "node 'score' reads ['reponse'], which no node before it writes (available: ['answer', "
        "'group_id', 'prompt', 'response', 'row_id', 'tokens']); did you mean 'response'?",
    ),
    "missing in the dataset": (
        lambda: trace_columns(DAG(ROLES, [node("a", reads=("promt",))]), SOURCE),
        "node 'a' reads ['promt'], which no node before it writes (available: ['answer', "
        "'group_id', 'prompt', 'row_id', 'tokens']); did you mean 'prompt'?",
    ),
    "two columns of one name": (
        lambda: trace_columns(
            DAG(
                ROLES,
                [
                    node("a"),
                    node("b", "a", fn=write_x),
                    node("c", "a", fn=write_x),
                    node("d", "b", "c"),
                ],
            ),
            SOURCE,
        ),
        "node 'd' joins two columns 'x', one from 'b' and one from 'c': give one of them another "
        "name",
    ),
    "other rows": (
        lambda: trace_columns(
            DAG(ROLES, [node("a"), node("b", "a", fn=fresh), node("c", "a", "b")]), SOURCE
        ),
        "node 'c' joins parents whose rows differ: 'a' has the rows of 'data', 'b' has the rows of "
        "'b'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, text = REFUSED[case]
    with pytest.raises(PlanError, match=re.escape(text)):
        make()


def test_order_is_as_written_with_parents_first():
    dag = DAG(ROLES, [node("c", "b"), node("a"), node("b", "a"), node("d"), node("e", "c")])
    assert [n.name for n in dag.ordered()] == ["a", "b", "c", "d", "e"]


def test_equal_dags_are_equal_and_hash_alike():
    def make(n):
        return DAG(
            ROLES, [node("a", fn=partial(answer, n={"b": (1, 2), "a": 0.5}) if n else answer)]
        )

    assert make(True) == make(True)
    assert hash(make(True)) == hash(make(True))
    assert make(True) != make(False)
    assert node("a", fn=partial(answer)) == node("a", fn=answer)
    assert node("a", reads=("prompt",)) != node("a")
    assert node("a", rows=Rows.ANYWHERE) != Node("a", plain, role="rollout")


def test_dataset_needs_no_identity_columns():
    stage = trace_columns(DAG(ROLES, [node("a", fn=answer, save_as="t")]), SOURCE)["a"]
    assert set(stage.outputs) == {"row_id", "group_id", "tokens", "prompt", "answer", "response"}
    assert str(stage.produced["row_id"].type) == "int64"


def test_optional_columns_are_needed_only_where_somebody_writes_them(grpo, source):
    assert "reference_logprobs" in trace_columns(grpo, source)["update"].needed
    nodes = [n for n in grpo.nodes if n.name != "ref"]
    nodes = [
        Node(
            n.name,
            n.fn,
            role=n.role,
            after=tuple(p for p in n.after if p != "ref"),
            rows=n.rows,
            save_as=n.save_as,
        )
        for n in nodes
    ]
    assert (
        "reference_logprobs" not in trace_columns(DAG(grpo.roles, nodes), source)["update"].needed
    )


def test_one_parent_may_be_given_by_its_name_alone():
    assert Node("b", plain, role="policy", after="a") == Node(
        "b", plain, role="policy", after=("a",)
    )
