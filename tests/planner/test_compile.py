"""Chains of a DAG and a placement: the rows that stay, the rows and columns that move, and the
order of links.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    Drop,
    LoadPrompts,
    Node,
    Recv,
    ReportTable,
    Role,
    Rows,
    RunNode,
    Save,
    Send,
    columns,
    compile_chains,
)
from siirl_dask.schema import fields

WORKERS = ("w0", "w1", "w2", "w3")
SPLIT = {"rollout": [0, 1], "policy": [2, 3], "reference": [2, 3]}
SOURCE = pa.schema({"prompt": pa.string()})


def build(device, rank): ...


def plain(ctx, table): ...


@columns(writes=fields("minibatch"))
def draw(ctx, table): ...


@columns(reads=["minibatch"])
def learn(ctx, table): ...


ROLES = (Role("a", build), Role("b", build))


def moving(plan):
    return {edge.name for edge in plan.edges if edge.moves}


def test_split_placement(grpo, source):
    plan = compile_chains(grpo, WORKERS, source, SPLIT)
    edges = {edge.name: edge for edge in plan.edges}
    assert list(edges) == [
        "rollout->old",
        "rollout->ref",
        "reward->advantage",
        "old->advantage",
        "ref->advantage",
        "advantage->update",
        "weights->load",
    ]
    assert edges["rollout->old"].schema.names == [
        "row_id",
        "group_id",
        "tokens",
        "prompt_ids",
        "response_ids",
    ]
    assert edges["rollout->old"].sources == ("w0", "w1")
    assert edges["rollout->old"].targets == ("w2", "w3")
    assert {
        edges[name].guide for name in ("reward->advantage", "old->advantage", "ref->advantage")
    } == {"old"}
    assert edges["advantage->update"].by_minibatch
    # unknown columns travel, since the table is kept
    assert "level" in edges["reward->advantage"].schema.names
    assert "level" not in edges["advantage->update"].schema.names


def test_the_chain_of_a_worker_in_full(grpo, source):
    chain = compile_chains(grpo, WORKERS, source, SPLIT).chains["w1"]
    found = []
    for link in chain.links:
        match link:
            case LoadPrompts(name, columns, index, count):
                found.append(("load", name, columns, index, count))
            case RunNode(node):
                found.append(("run", node.name))
            case Send(edge):
                found.append(("send", edge.name))
            case Recv(edge, guide):
                found.append(("recv", edge.name, guide.name))
            case Save(node, table, index, count):
                found.append(("keep", node, table, index, count))
            case Drop(table):
                found.append(("drop", table))
    needed = ("row_id", "group_id", "tokens", "prompt", "answer", "level")
    assert set(found[0][2]) == set(needed)
    assert [(*item[:2], *item[3:]) if item[0] == "load" else item for item in found] == [
        ("load", "data->prompts", 1, 2),
        ("run", "prompts"),
        ("drop", "data->prompts"),
        ("run", "rollout"),
        ("drop", "prompts"),
        ("send", "rollout->old"),
        ("send", "rollout->ref"),
        ("run", "reward"),
        ("drop", "rollout"),
        ("send", "reward->advantage"),
        ("drop", "reward"),
        ("recv", "weights->load", "weights->load"),
        ("run", "load"),
        ("drop", "weights->load"),
        ("drop", "load"),
    ]


def test_one_worker_moves_nothing(grpo, source):
    plan = compile_chains(grpo, ["only"], source)
    assert plan.edges == ()
    assert not [link for link in plan.chains["only"].links if isinstance(link, Send | Recv)]


def test_a_worker_without_a_role_has_nothing_to_do_but_to_report_for_saved_tables(grpo, source):
    plan = compile_chains(grpo, (*WORKERS, "idle"), source, SPLIT)
    assert plan.chains["idle"].links == (ReportTable("rollouts"),)


def test_keep_is_numbered_by_rank(grpo, source):
    plan = compile_chains(grpo, WORKERS, source, {**SPLIT, "policy": [3, 2]})
    kept = {
        w: [link for link in chain.links if isinstance(link, Save)]
        for w, chain in plan.chains.items()
    }
    assert kept == {
        "w0": [],
        "w1": [],
        "w2": [Save("advantage", "rollouts", 1, 2)],
        "w3": [Save("advantage", "rollouts", 0, 2)],
    }


def test_rows_that_are_everywhere_leave_from_one_worker_only():
    dag = DAG(
        ROLES,
        [
            Node("x", plain, role="a"),
            Node("all", plain, role="a", after="x", rows=Rows.REPLICATED),
            Node("still", plain, role="a", after="all", save_as="table"),
            Node("out", plain, role="b", after="still"),
        ],
    )
    plan = compile_chains(dag, WORKERS, SOURCE, {"a": [0, 1], "b": [2, 3]})
    edge = next(edge for edge in plan.edges if edge.name == "still->out")
    assert edge.sources == ("w0",)
    assert [link for link in plan.chains["w0"].links if isinstance(link, Save)] == [
        Save("still", "table", 0, 1)
    ]
    for link in plan.chains["w1"].links:
        assert not isinstance(link, Save)
        assert not (isinstance(link, Send) and link.edge.name == "still->out")


def test_what_joins_rows_that_are_everywhere_goes_everywhere():
    dag = DAG(
        ROLES,
        [
            Node("x", plain, role="a"),
            Node("all", plain, role="a", after="x", rows=Rows.REPLICATED),
            Node("far", plain, role="b", after="x"),
            Node("join", plain, role="a", after=("all", "far")),
        ],
    )
    plan = compile_chains(dag, WORKERS, SOURCE, {"a": [0, 1], "b": [2, 3]})
    assert {edge.name: edge.rows for edge in plan.edges if edge.target == "join"} == {
        "far->join": Rows.REPLICATED,
        "all->join": Rows.REPLICATED,
    }
    assert "all->join" not in moving(plan)


def test_rows_balanced_by_another_minibatch_move_again():
    """Two nodes that want their mini-batches balanced share a layout only if the mini-batches
    are the same.
    """
    nodes = [Node("x", draw, role="a"), Node("one", learn, role="a", after="x", rows=Rows.BALANCED)]
    same = DAG(ROLES, [*nodes, Node("two", learn, role="a", after="one", rows=Rows.BALANCED)])
    drawn_again = DAG(
        ROLES,
        [
            *nodes,
            Node("y", draw, role="a", after="one"),
            Node("two", learn, role="a", after="y", rows=Rows.BALANCED),
        ],
    )
    assert moving(compile_chains(same, WORKERS, SOURCE)) == {"x->one"}
    assert moving(compile_chains(drawn_again, WORKERS, SOURCE)) == {"x->one", "y->two"}


def test_rows_spread_from_different_places_move_again():
    """Rows that two branches bring from different workers are not where each other's are, though
    both are spread.
    """
    roles = (*ROLES, Role("c", build))
    nodes = [
        Node("x", plain, role="a"),
        Node("y", plain, role="b", after="x", rows=Rows.BALANCED),
        Node("from_x", plain, role="c", after="x"),
        Node("from_y", plain, role="c", after="y"),
        Node("join", plain, role="c", after=("from_x", "from_y")),
    ]
    plan = compile_chains(
        DAG(roles, nodes), WORKERS, SOURCE, {"a": [0, 1], "b": [1, 2], "c": [2, 3]}
    )
    assert "from_y->join" in moving(plan)
    assert "from_x->join" not in moving(plan)


def two_ways(placement):
    """Return the moves where two branches bring the same rows to ``c``, balanced, from ``a`` and
    from ``b``.
    """
    nodes = [
        Node("x", plain, role="a"),
        Node("y", plain, role="b", after="x", rows=Rows.GROUPED),
        Node("from_x", plain, role="c", after="x", rows=Rows.BALANCED),
        Node("from_y", plain, role="c", after="y", rows=Rows.BALANCED),
        Node("join", plain, role="c", after=("from_x", "from_y")),
    ]
    return moving(
        compile_chains(
            DAG((*ROLES, Role("c", build)), nodes), [*WORKERS, "w4", "w5"], SOURCE, placement
        )
    )


def test_rows_balanced_from_elsewhere_share_one_layout():
    assert "from_y->join" not in two_ways({"a": [0, 1], "b": [2, 3], "c": [4, 5]})


def test_balanced_rows_that_may_have_stayed_move_again_to_join():
    assert "from_y->join" in two_ways({"a": [0, 1], "b": [3, 4], "c": [4, 5]})
    assert "from_x->join" not in two_ways({"a": [0, 1], "b": [3, 4], "c": [4, 5]})


@pytest.mark.parametrize("after", [("x", "groups"), ("groups", "x")])
def test_the_parent_whose_rows_lie_as_wanted_leads_and_stays(after):
    nodes = [
        Node("x", plain, role="a"),
        Node("y", plain, role="b", after="x"),
        Node("groups", plain, role="a", after="y", rows=Rows.GROUPED),
        Node("join", plain, role="a", after=after, rows=Rows.GROUPED),
        Node("again", plain, role="a", after="join", rows=Rows.GROUPED),
    ]
    plan = compile_chains(DAG(ROLES, nodes), WORKERS, SOURCE, {"a": [0, 1], "b": [1, 2]})
    assert moving(plan) == {"x->y", "y->groups", "x->join"}


@pytest.mark.parametrize(
    ("workers", "placement", "text"),
    [
        (
            WORKERS,
            {"polcy": [0]},
            "the placement names role 'polcy', which the DAG has not; did you mean 'policy'?",
        ),
        (
            WORKERS,
            {"policy": [4]},
            "the placement puts role 'policy' on worker 4: there are 4, from 0",
        ),
        (WORKERS, {"policy": [-1]}, "the placement puts role 'policy' on worker -1"),
        (
            WORKERS,
            {"policy": []},
            "the placement puts role 'policy' on []: expected workers, each one once",
        ),
        (WORKERS, {"policy": [1, 1]}, "the placement puts role 'policy' on [1, 1]"),
        ([], {}, "the plan is for workers []: expected names"),
        (["w", "w"], {}, "the plan is for workers ['w', 'w']: expected names, each once"),
    ],
)
def test_refused(grpo, source, workers, placement, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        compile_chains(grpo, workers, source, placement)


def diamonds(k: int) -> DAG:
    nodes = [Node("n0", plain, role="a")]
    for i in range(k):
        nodes.append(Node(f"l{i}", plain, role="a", after=(f"n{i}",)))
        nodes.append(Node(f"r{i}", plain, role="b", after=(f"n{i}",)))
        nodes.append(Node(f"n{i + 1}", plain, role="a", after=(f"l{i}", f"r{i}")))
    return DAG(ROLES, nodes)


def test_plan_size_is_linear_in_the_number_of_diamonds():
    def size(k: int) -> int:
        plan = compile_chains(diamonds(k), WORKERS, SOURCE, {"a": [0, 1], "b": [2, 3]})
        links = sum(len(chain.links) for chain in plan.chains.values())
        return links + sum(len(edge.schema) for edge in plan.edges)

    sizes = [size(k) for k in (10, 20, 40, 80)]
    assert sizes[3] - sizes[2] == 2 * (sizes[2] - sizes[1]) == 4 * (sizes[1] - sizes[0])
