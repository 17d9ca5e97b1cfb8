"""Nodes that take their rows from an earlier step, so that their workers need not wait for this
one's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    Drop,
    Lagged,
    Node,
    Recv,
    RunNode,
    TableSizes,
    compile_chains,
    dag_from_spec,
    dag_to_spec,
)
from siirl_dask.views.plan import as_data, describe

WORKERS = ("w0", "w1", "w2", "w3")
SIZES = TableSizes(prompts=8, prompt_tokens=4, response_tokens=4)
SPLIT = {"rollout": [0, 1], "policy": [2, 3], "reference": [2, 3]}


def late(dag: DAG, **changes) -> DAG:
    """The DAG with changes to the node that loads weights."""
    return DAG(
        dag.roles,
        tuple(replace(node, **changes) if node.name == "load" else node for node in dag.nodes),
    )


def test_a_lagged_node_is_one_link_and_changes_no_other(grpo, source):
    plan, usual = (compile_chains(dag, WORKERS, source, SPLIT) for dag in (late(grpo, lag=2), grpo))
    for worker in WORKERS[:2]:
        (link,) = (link for link in plan.chains[worker].links if isinstance(link, Lagged))
        assert link.steps == 2
        assert [type(inner) for inner in link.links] == [Recv, RunNode, Drop, Drop]
    without = {worker: [type(link) for link in chain.flat] for worker, chain in plan.chains.items()}
    assert without == {
        worker: [type(link) for link in chain.links] for worker, chain in usual.chains.items()
    }
    assert plan.edges == usual.edges


def test_a_lagged_node_on_its_parents_workers_is_refused(grpo, source):
    for placement in ({}, {"rollout": [0, 1], "policy": [1, 2]}):
        with pytest.raises(PlanError, match=r"'load' is 1 step behind .*cluster\.placement"):
            compile_chains(late(grpo, lag=1), WORKERS, source, placement)


def test_a_late_node_is_the_last_of_its_branch_and_keeps_nothing(grpo, source):
    after = Node("after", grpo.node("load").fn, role="rollout", after="load")
    with pytest.raises(
        PlanError, match="'after' comes after 'load', whose rows are of an earlier step"
    ):
        DAG(grpo.roles, (*late(grpo, lag=1).nodes, after))
    with pytest.raises(PlanError, match="save the output of a node before it"):
        compile_chains(late(grpo, lag=1, save_as="weights"), WORKERS, source, SPLIT)
    for steps in (-1, "1", 1.5):
        with pytest.raises(PlanError, match="expected a number of steps"):
            late(grpo, lag=steps)


def test_how_far_behind_a_node_is_survives_yaml_and_makes_another_dag(grpo):
    dag = late(grpo, lag=3)
    spec = dag_to_spec(dag)
    assert dag_from_spec(spec["roles"], spec["nodes"]) == dag != grpo


def test_a_plan_says_which_node_is_behind(grpo, source):
    plan = compile_chains(late(grpo, lag=2), WORKERS, source, SPLIT)
    assert "load, 2 steps behind (from weights)" in describe(plan, SIZES)
    (loading,) = (c for c in as_data(plan, SIZES)["chains"] if c["workers"] == ["w0", "w1"])
    assert {"do": "run", "what": "load"} in loading["links"]
