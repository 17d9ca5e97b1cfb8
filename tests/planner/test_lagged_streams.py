"""Streams to nodes that are steps ahead: their sources wait, and no two workers for each other,
on any placement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from siirl_dask.errors import PlanError
from siirl_dask.planner import (
    DAG,
    Iteration,
    Lagged,
    Node,
    Phase,
    Plan,
    Recv,
    Role,
    Rows,
    RunNode,
    Send,
    Stream,
    TableSizes,
    compile_chains,
    usage,
)
from siirl_dask.planner.inputs import PlanInputs, alike
from siirl_dask.views.plan import describe
from siirl_dask.worker.lagged import PastIterations
from tests.planner.random_dags import (
    QUICKLY,
    ROLES,
    SOURCE,
    build,
    gives,
    placements,
    same_rows,
    takes,
)

WORKERS = ("w0", "w1", "w2", "w3")
APART = {"samples": [0, 1], "learns": [2, 3]}
LOOKAHEAD = 1


def ahead(lag: int, *others: Node) -> DAG:
    nodes = (
        Node("sample", same_rows, role="samples"),
        Node("learn", same_rows, role="learns", after="sample"),
        Node("give", gives, role="learns", after="learn", writes=SOURCE),
        *others,
        Node(
            "take",
            takes,
            role="samples",
            after="give",
            rows=Rows.REPLICATED,
            reads=("d0", "d2"),
            lag=lag,
        ),
    )
    return DAG((Role("samples", build), Role("learns", build)), nodes)


def test_a_lagged_stream_is_lagged_where_it_is_taken_and_takes_the_memory_of_parts():
    plan = compile_chains(ahead(2), WORKERS, SOURCE, APART)
    for worker in WORKERS[:2]:
        (link,) = [link for link in plan.chains[worker].links if isinstance(link, Lagged)]
        assert link.steps == 2
        assert [(inner.gives, inner.takes) for inner in link.links] == [(False, True)]
    for worker in WORKERS[2:]:
        assert [
            (link.gives, link.takes)
            for link in plan.chains[worker].links
            if isinstance(link, Stream)
        ] == [(True, False)]
    sizes = TableSizes(
        prompts=1,
        prompt_tokens=1,
        response_tokens=1,
        totals={"give": 9000},
        pieces={"give": (10, 1000)},
        part=1000,
    )
    assert "take, 2 steps behind (in parts from give)" in describe(plan, sizes)
    assert all(used.tables < 4200 for used in usage(plan, sizes).values())


@pytest.mark.parametrize(
    ("placement", "others"),
    [
        ({"samples": [0, 1], "learns": [2, 3], "scores": [0, 1, 2, 3]}, ()),
        (APART | {"scores": [1]}, (Node("aside", same_rows, role="scores", after="learn"),)),
    ],
)
def test_a_table_is_made_whole_where_the_takers_wait_for_the_givers_elsewhere(placement, others):
    """A role that both share, or a node that reads what the others learned."""
    scores = Node("score", same_rows, role="scores", after="sample")
    dag = DAG((*ahead(1).roles, Role("scores", build)), (*ahead(1).nodes, scores, *others))
    plan = compile_chains(dag, WORKERS, SOURCE, placement)
    assert not plan.streams
    (link,) = [link for link in plan.chains["w0"].links if isinstance(link, Lagged)]
    assert [type(inner) for inner in link.links[:2]] == [Recv, RunNode]


def test_a_step_after_a_replay_takes_weights_as_the_replay_gave_them():
    """In the replay nothing else makes the workers wait for each other; both must make the table
    whole.
    """
    shared = {"samples": [0, 1], "learns": [2, 3], "scores": [0, 1, 2, 3]}
    scores = Node("score", same_rows, role="scores", after="sample")
    roles = (*ahead(1).roles, Role("scores", build))
    train = compile_chains(DAG(roles, (*ahead(1).nodes, scores)), WORKERS, SOURCE, shared)
    replay = compile_chains(DAG(roles, ahead(1).nodes), WORKERS, SOURCE, shared)
    assert (train.lagged_streams, replay.lagged_streams) == (frozenset(), {"give"})
    both = alike({"train": train, "replay": replay})
    assert both["train"] is train
    assert both["replay"].lagged_streams == frozenset()
    assert PlanInputs.of(both["replay"]).compile(WORKERS) == both["replay"]
    assert alike({"train": replay, "replay": replay})["train"] is replay


@dataclass
class Steps:
    """Runs the chains of some iterations, and nothing of what they compute; a stream's source
    waits for all sinks.
    """

    plan: Plan
    iterations: list[Iteration]
    done: set[tuple[object, ...]] = field(default_factory=set)
    """Deeds of each worker: it has sent along an edge, has come to a node, has given or taken a
    stream."""

    def run(self, lag: int) -> None:
        places = dict.fromkeys(self.plan.chains, 0)
        links = {worker: [*self._links(worker)] for worker in places}
        ends = {
            worker: [at for at, (link, _) in enumerate(own) if link is None]
            for worker, own in links.items()
        }
        while any(at < len(links[worker]) for worker, at in places.items()):
            before = dict(places), len(self.done)
            completed = min(sum(at > end for end in ends[worker]) for worker, at in places.items())
            for worker in places:
                while places[worker] < len(links[worker]):
                    link, iteration = links[worker][places[worker]]
                    begun = sum(places[worker] > end for end in ends[worker])
                    if begun > completed + LOOKAHEAD + lag or not self._goes_on(
                        worker, link, iteration
                    ):
                        break
                    places[worker] += 1
            assert (places, len(self.done)) != before, f"they stand still: {places}"

    def _links(self, worker):
        window = PastIterations({"train": self.plan.chains.values()})
        for iteration in self.iterations:
            window.begin(iteration, 0)
            for link in self.plan.chains[worker].links:
                if not isinstance(link, Lagged):
                    yield link, iteration
                    continue
                for past in window.skipped(iteration, link.steps):
                    yield from ((inner, past) for inner in link.links if isinstance(inner, Stream))
                if (earlier := window.lagged(iteration, link.steps)) is not None:
                    yield from ((inner, earlier) for inner in link.links)
            yield None, iteration

    def _goes_on(self, worker, link, iteration) -> bool:
        at, place = iteration.sequence, self.plan.placement
        match link:
            case RunNode(node):
                self.done.add((node.name, at, worker))
                return all((node.name, at, other) in self.done for other in place[node.role])
            case Send(edge):
                self.done.add((edge.name, at, worker))
            case Recv(edge, guide):
                return all(
                    (one.name, at, other) in self.done
                    for one in (edge, guide)
                    for other in one.sources
                )
            case Stream(source, target, gives=gives, takes=takes):
                self.done |= {(source.name, at, worker)} if gives else set()
                givers = all((source.name, at, other) in self.done for other in place[source.role])
                if takes and givers:
                    self.done.add((target.name, at, worker))
                takers = all((target.name, at, other) in self.done for other in place[target.role])
                return givers and takers
        return True


@st.composite
def lagged_plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """A few nodes in any order of roles, of which one's table goes to a node that is behind."""
    names, count, lag = (
        [f"n{i}" for i in range(draw(st.integers(1, 5)))],
        draw(st.integers(2, 5)),
        draw(st.integers(1, 3)),
    )
    roles = st.sampled_from(ROLES)
    nodes = [
        Node(
            name,
            same_rows,
            role=draw(roles),
            after=tuple(draw(st.permutations(names[:at]))[: draw(st.integers(1, 2))]),
        )
        for at, name in enumerate(names)
    ]
    giving, taking, *_ = draw(st.permutations(ROLES))
    give = Node("give", gives, role=giving, after=draw(st.sampled_from(names)), writes=SOURCE)
    take = Node(
        "take", takes, role=taking, after="give", rows=Rows.REPLICATED, reads=("d0",), lag=lag
    )
    nodes.insert(draw(st.integers(1 + names.index(give.after[0]), len(names))), give)
    dag = DAG([Role(role, build) for role in ROLES], [*nodes, take])
    try:
        return compile_chains(
            dag, [f"w{i}" for i in range(count)], SOURCE, draw(placements(count))
        ), lag
    except PlanError as error:
        assume("does not leave its workers" not in str(error))
        raise


@QUICKLY
@given(lagged_plans(), st.lists(st.booleans(), min_size=1, max_size=5))
def test_no_workers_wait_for_each_other_in_a_circle_whatever_is_behind(planned, drains):
    plan, lag = planned
    Steps(
        plan, [Iteration(Phase.TRAIN, n + 1, n, drain) for n, drain in enumerate([*drains, True])]
    ).run(lag)


def test_roles_of_which_each_worker_has_both_pass_tensors_on_without_an_edge():
    """A stream whose nodes handle tensors needs no table there: no bytes are planned for it."""
    from siirl_dask.nodes import load_weights, publish_weights

    nodes = (
        Node("give", publish_weights, role="learns"),
        Node("take", load_weights, role="samples", after="give", rows=Rows.REPLICATED),
    )
    dag = DAG((Role("learns", build), Role("samples", build)), nodes)
    for placement, edges in (({}, 0), ({"learns": [2, 0, 1, 3]}, 0), ({"learns": [0, 1, 2]}, 1)):
        plan = compile_chains(dag, WORKERS, SOURCE, placement)
        assert len(plan.edges) == edges
        streams = [
            link
            for chain in plan.chains.values()
            for link in chain.links
            if isinstance(link, Stream)
        ]
        assert len(streams) == len(WORKERS)
        assert {link.edge is None for link in streams} == {not edges}
    sizes = TableSizes(prompts=1, prompt_tokens=1, response_tokens=1)
    assert re.search(
        r"give -> take +\S+ replicated in parts +local +-",
        describe(compile_chains(dag, WORKERS, SOURCE), sizes),
    )
