"""Which nodes begin with rows that a node above them has finished, and how a plan tells."""

import json
from functools import partial

import pyarrow as pa
import pytest

from siirl_dask.planner import (
    DAG,
    ContractChanges,
    KeptRows,
    Node,
    Role,
    RoleCost,
    RunNode,
    TableSizes,
    builds,
    columns,
    compile_chains,
)
from siirl_dask.schema import fields, make_schema
from siirl_dask.views.plan import as_data, describe

SOURCE = make_schema({"prompt": pa.string(), "answer": pa.string(), "level": pa.int64()})
WORKERS = ("a", "b", "c")


def preflight(options, workers, config):
    return RoleCost(memory=0)


def build(device, rank): ...


@builds(preflight=preflight, beside=lambda options: options["processes"] > 0)
def build_scorer(device, rank, *, processes): ...


def begin(resource, **options): ...


@columns(reads=["prompt"], writes=fields("response", "worker"), expand="n", early=["response"])
def generate(ctx, table, *, n: int = 2): ...


def keeps(**options):
    return ContractChanges(carries=KeptRows(begin, begin))


@columns(
    reads=["prompt"],
    writes=fields("response"),
    expand="n",
    early=["response"],
    depends_on_options=keeps,
)
def generate_over_several_steps(ctx, table, *, n: int = 2): ...


@columns(reads=["response"], writes=fields("finish_reason"))
def look(ctx, table): ...


@columns(reads=["response"], writes=fields("response"))
def rewrite(ctx, table): ...


@columns(reads=["prompt", "response", "answer"], writes=fields("reward"), by_row=begin)
def score(ctx, table): ...


def dag(*, processes=1, after="rollout", reads=None, more=(), role="reward"):
    roles = (
        Role("rollout", build),
        Role("reward", partial(build_scorer, processes=processes)),
        Role("policy", build),
    )
    return DAG(
        roles,
        (
            Node("rollout", generate, role="rollout"),
            *more,
            Node("reward", score, role=role, after=after, reads=reads),
        ),
    )


def early(graph, placement=None, **options):
    plan = compile_chains(graph, WORKERS, SOURCE, placement, **options)
    runs = [
        link for chain in plan.chains.values() for link in chain.flat if isinstance(link, RunNode)
    ]
    return {run.early for run in runs if run.node.name == "reward"}.pop()


def test_a_node_that_works_row_by_row_begins_with_finished_rows_and_takes_what_it_reads():
    found = early(dag())
    assert found.node == "rollout"
    assert found.columns == ("row_id", "group_id", "prompt", "response", "answer")


def test_it_begins_with_the_rows_of_a_node_further_above_that_has_all_columns():
    aside = Node("look", look, role="rollout", after="rollout")
    assert early(dag(more=(aside,), after="look")).node == "rollout"
    assert early(dag(reads=("response", "level"))).columns == (
        "row_id",
        "group_id",
        "response",
        "level",
    )


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (dag(), {"overlap": False}),
        (dag().replace("rollout", fn=generate_over_several_steps), {}),
        (dag(processes=0), {}),
        (dag(role="policy"), {}),
        (dag(), {"placement": {"rollout": [0, 1], "reward": [0, 1, 2]}}),
        (dag(), {"placement": {"rollout": [0, 1], "reward": [2]}}),
        (dag(reads=("response", "worker")), {}),
        (
            dag(
                more=(Node("look", look, role="rollout", after="rollout"),),
                after="look",
                reads=("response", "finish_reason"),
            ),
            {},
        ),
        (
            dag(more=(Node("rewrite", rewrite, role="rollout", after="rollout"),), after="rewrite"),
            {},
        ),
    ],
    ids=[
        "switched off",
        "rows that may stay for a later step",
        "in the worker's own thread",
        "a role that does not say so",
        "its rows move",
        "its rows are on other workers",
        "a column that a finished row does not have",
        "a column of a node in between",
        "a column that is written again in between",
    ],
)
def test_a_node_waits_for_all_rows_where_it_could_not_begin_or_would_gain_nothing(graph, options):
    assert early(graph, **options) is None


def test_a_function_that_makes_rows_cannot_work_row_by_row():
    with pytest.raises(TypeError, match="keeps its rows"):
        columns(by_row=begin, new_rows=True)


def test_a_plan_says_which_node_begins_during_which():
    for overlap in (True, False):
        plan = compile_chains(dag(), WORKERS, SOURCE, overlap=overlap)
        sizes = TableSizes(prompts=4, prompt_tokens=8, response_tokens=8)
        assert ("reward (begins during rollout)" in describe(plan, sizes)) is overlap
        assert (
            "reward with finished rows of rollout" in json.dumps(as_data(plan, sizes))
        ) is overlap
