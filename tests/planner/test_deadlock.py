"""A plan on which workers could wait for each other in a circle is refused, whichever way it is
broken.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from siirl_dask.errors import PlanError
from siirl_dask.planner import Chain, Plan, Recv, RunNode, Send, compile_chains
from siirl_dask.planner.deadlock import check_order

WORKERS = ("w0", "w1", "w2", "w3")
SPLIT = {"rollout": [0, 1], "policy": [2, 3], "reference": [2, 3]}


@pytest.fixture
def plan(grpo, source) -> Plan:
    return compile_chains(grpo, WORKERS, source, SPLIT)


def with_links(plan: Plan, worker: str, change) -> Plan:
    links = change(list(plan.chains[worker].links))
    return replace(plan, chains={**plan.chains, worker: Chain(worker, tuple(links))})


def at(links, kind, name) -> int:
    """Return the position of the link of a node's Run, or of an edge."""
    return next(
        index
        for index, link in enumerate(links)
        if isinstance(link, kind)
        and name == (link.node.name if kind is RunNode else link.edge.name)
    )


def swapped(kind, one, other):
    def change(links):
        a, b = at(links, kind, one), at(links, kind, other)
        links[a], links[b] = links[b], links[a]
        return links

    return change


def without(kind, name):
    return lambda links: [
        link for index, link in enumerate(links) if index != at(links, kind, name)
    ]


def moved(kind, name, before):
    def change(links):
        link = links.pop(at(links, kind, name))
        links.insert(at(links, RunNode, before), link)
        return links

    return change


BROKEN = {
    "two workers of a role run two of its nodes in different orders": (
        ("w3", swapped(RunNode, "old", "ref")),
        "worker 'w3' runs 'old' after 'ref'",
    ),
    "a worker of a role lacks one of its nodes": (
        ("w1", without(RunNode, "reward")),
        "worker 'w1' runs ['prompts', 'rollout', 'load'] of role 'rollout': expected ['prompts', "
        "'rollout', 'reward',",
    ),
    "a worker sends later than it could": (
        ("w0", moved(Send, "rollout->old", "load")),
        "worker 'w0' sends rollout->old after it ran 'reward'",
    ),
    "a worker never sends": (
        ("w1", without(Send, "reward->advantage")),
        "worker 'w1' never sends reward->advantage",
    ),
    "a worker waits for rows before it has sent others": (
        ("w0", moved(Recv, "weights->load", "rollout")),
        "worker 'w0' receives weights->load, guided by weights->load, before 'rollout'",
    ),
}


def test_what_is_compiled_holds(plan):
    check_order(plan)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plan_is_refused(plan, how):
    (worker, change), text = BROKEN[how]
    with pytest.raises(PlanError, match=re.escape(text)):
        check_order(with_links(plan, worker, change))


def test_an_edge_against_the_order_is_refused(plan):
    (backwards,) = [edge for edge in plan.edges if edge.name == "weights->load"]
    broken = replace(plan, edges=(replace(backwards, target="rollout"),))
    with pytest.raises(PlanError, match="receives weights->rollout, against the order"):
        check_order(broken)
