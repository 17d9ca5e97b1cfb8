"""Nodes that a DAG in YAML gives once for several rounds are the DAG that is written out, and
mistakes have a name.
"""

import pytest

from siirl_dask.errors import PlanError
from siirl_dask.planner import dag_from_spec
from siirl_dask.planner.spec.rounds import written_out

BUILD = {"policy": {"build": "siirl_dask.testing.rows:build_nothing"}}


def node(name, after=None, run="siirl_dask.nodes:take_agents", **options):
    return {
        "name": name,
        "run": run,
        "role": "policy",
        "after": after,
        "with": {"agents": ["a"], **options},
    }


def repeat(*nodes, times=3, **keys):
    return {"name": "debate", "repeat": {"times": times, "nodes": list(nodes)}, **keys}


def test_rounds_are_the_nodes_written_out():
    short = [
        node("start"),
        repeat(
            node("ask_{round}", "{previous}"), node("tell_{round}", ["ask_{round}"]), after="start"
        ),
        node("end", "debate"),
        node("other_end", ["start", "debate"]),
    ]
    long = [
        node("start"),
        node("ask_1", "start"),
        node("tell_1", "ask_1"),
        node("ask_2", "tell_1"),
        node("tell_2", "ask_2"),
        node("ask_3", "tell_2"),
        node("tell_3", "ask_3"),
        node("end", "tell_3"),
        node("other_end", ["start", "tell_3"]),
    ]
    assert dag_from_spec(BUILD, short) == dag_from_spec(BUILD, long)


def test_a_number_alone_stays_a_number_and_other_braces_stay():
    made, _ = written_out(
        [
            repeat(
                {"name": "n{round}", "with": {"round": "{round}", "text": "{0} a{round}"}}, times=2
            )
        ]
    )
    assert [one["with"] for one in made] == [
        {"round": 1, "text": "{0} a1"},
        {"round": 2, "text": "{0} a2"},
    ]


def test_the_first_round_of_a_dag_may_come_after_nothing():
    made, _ = written_out(
        [
            repeat(
                node("n{round}", "{previous}"),
                node("m{round}", ["n{round}", "{previous}"]),
                times=2,
            )
        ]
    )
    assert [one["after"] for one in made] == [None, ["n1"], "m1", ["n2", "m1"]]


def test_every_node_has_the_place_of_what_it_is_written_from():
    _, places = written_out(
        [node("start"), repeat(node("n{round}", "{previous}"), times=2)], ["a.yaml:1", "a.yaml:2"]
    )
    assert places == ["a.yaml:1", "a.yaml:2", "a.yaml:2"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            repeat(node("n{round}"), times=0),
            "repeat 'debate' has times=0: expected a whole number of rounds",
        ),
        (repeat(node("n{round}"), times="3"), "times='3'"),
        (repeat(), r"nodes=\[\]: expected a list of at least one node"),
        (repeat(node("n")), r"makes 'n' in every round: expected \{round\} in the name"),
        (
            repeat(node("n{rounds}")),
            r"'\{rounds\}', which stands for nothing .*did you mean 'round'",
        ),
        (
            repeat(node("n{round}"), role="policy"),
            r"unknown key 'role' \(keys: \['name', 'after', 'repeat'\]\)",
        ),
        ({"name": "debate", "repeat": {"time": 3}}, "unknown key 'time' .*did you mean 'times'"),
        ({"name": "debate", "repeat": 3}, r"is 3: expected \{times: 3, nodes: \[...\]\}"),
        (repeat(repeat(node("n{round}"))), "no repeat within it"),
        (repeat(node("n{round}", "x{previous}")), "has no round before its first: give it after="),
        (
            repeat(node("n{round}"), after=["a", "b"]),
            r"after=\['a', 'b'\]: expected the name of one node",
        ),
    ],
)
def test_a_mistake_is_refused_by_name_and_place(entry, said):
    with pytest.raises(PlanError, match=f"run.yaml:7: .*{said}"):
        written_out([entry], ["run.yaml:7"])
