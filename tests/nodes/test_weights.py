"""Tests of weight streams over real executors and databuffers: engines get the trainer's weights
on any placement.
"""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import NodeError
from siirl_dask.nodes import load_weights, publish_weights
from siirl_dask.planner import DAG, Node, Role, Rows, columns, compile_chains
from siirl_dask.testing.local_pool import LocalPool

KINDS = (torch.float32, torch.bfloat16)


class Holder:
    """A trainer whose weights depend on the step, and that can fail on the way."""

    def __init__(self, shapes, fails_at=None, changes=False):
        self.shapes, self.fails_at, self.changes = shapes, fails_at, changes
        self.step = 0

    def weights(self):
        self.step += 1
        for number, shape in enumerate(self.shapes):
            if number == self.fails_at and self.step > 1:  # they were announced
                raise ZeroDivisionError("in the middle")
            size = int(np.prod(shape)) + (self.changes and self.step > 1 and number == 1)
            values = torch.arange(size, dtype=torch.float32) + number
            yield (
                f"p{number}",
                values.reshape((-1,) if self.changes else shape).to(KINDS[number % 2]),
            )


class Collector:
    """An engine that copies its weights, and records what memory was held meanwhile."""

    def __init__(self, takes=None, fails_at=None):
        self.loaded, self.version, self.takes, self.fails_at = {}, 0, takes, fails_at
        self.look = lambda: 0
        self.most = 0
        self.slept = []

    def sleep(self, **told):
        self.slept.append(told)

    def load_weights(self, tensors, version):
        self.loaded = {}
        for number, (name, tensor) in enumerate(tensors):
            if number == self.takes:
                break
            if number == self.fails_at:
                raise ZeroDivisionError("while loading")
            self.loaded[name] = tensor.clone()
            self.most = max(self.most, self.look())
        self.version = version


def build(device, rank, *, kind, options):
    return kind(**options)


@columns(reads=["prompt"])
def computes(ctx, table):
    """A node that needs the device's memory."""
    ctx.free_device()
    return table


@columns(reads=["parameter", "data"])
def lengths(ctx, table):
    """A user's node that reads the weights as rows."""
    values = [len(value) for value in table["data"].to_pylist()]
    ctx.resource.loaded = dict(zip(table["parameter"].to_pylist(), values, strict=True))
    return table


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    url = tmp_path_factory.mktemp("data") / "data.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 4, "answer": ["b"] * 4}), url)
    return Source(url=str(url), prompt="prompt", answer="answer", batch_size=2, seed=0)


def pool(
    source,
    placement,
    shapes,
    part,
    *,
    reader=load_weights,
    trainer=None,
    engine=None,
    broadcast=False,
    hosts=None,
):
    roles = (
        Role("policy", partial(build, kind=Holder, options={"shapes": shapes} | (trainer or {}))),
        Role("rollout", partial(build, kind=Collector, options=engine or {})),
    )
    nodes = (
        Node("weights", publish_weights, role="policy"),
        Node("load", reader, role="rollout", after="weights", rows=Rows.REPLICATED),
    )
    workers = [f"w{number}" for number in range(1 + max(map(max, placement.values())))]
    schema = source_schema(open_source(source).schema, source)
    plan = compile_chains(DAG(roles, nodes), workers, schema, placement, hosts)
    return LocalPool(plan, source, url="", stream_bytes=part, broadcast=broadcast)


def engines(workers):
    return {
        w: workers.resources(w)["rollout"]
        for w in workers.workers
        if "rollout" in workers.resources(w)
    }


def assert_nothing_is_held(workers):
    gc.collect()
    # a relay acks when those that it passed rows on to have acked
    for _ in range(100 if workers.plan.hosts else 0):
        workers.wait_for_acks()
    assert {buffer.unacked_bytes for buffer in workers.databuffers.values()} == {0}
    assert {buffer.arena.in_use for buffer in workers.databuffers.values()} == {0}


places = st.integers(1, 4).flatmap(
    lambda count: st.fixed_dictionaries(
        {
            role: st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
            for role in ("policy", "rollout")
        }
    )
)
shapes = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), max_size=12)


hosts = st.one_of(st.none(), st.lists(st.sampled_from("abc"), min_size=4, max_size=4))


@settings(max_examples=40, derandomize=True, database=None)
@given(
    placement=places,
    shapes=shapes,
    part=st.sampled_from([1, 300, 1500, 2**28]),
    broadcast=st.booleans(),
    hosts=hosts,
)
def test_every_engine_gets_the_trainers_weights_and_nothing_stays(
    source, placement, shapes, part, broadcast, hosts
):
    on = hosts and {f"w{number}": host for number, host in enumerate(hosts)}
    with pool(source, placement, shapes, part, broadcast=broadcast, hosts=on) as workers:
        assert workers.plan.streams == {"weights": "load"}
        for step in (1, 2):
            workers.run(step)
            expected = dict(Holder(shapes).weights())
            for engine in engines(workers).values():
                assert engine.version == step
                assert list(engine.loaded) == list(expected)
                for name, tensor in expected.items():
                    assert engine.loaded[name].dtype == tensor.dtype
                    assert torch.equal(engine.loaded[name], tensor)
        assert_nothing_is_held(workers)


def buffers():
    """Return the bytes of the buffers that are alive."""
    tensors = [
        one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype is torch.uint8
    ]
    return sum(
        {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors
        }.values()
    )


def test_a_broadcast_has_two_buffers_on_either_side(source):
    part = 40_000
    with pool(
        source, {"policy": [0], "rollout": [1]}, [(64, 64)] * 12, part, broadcast=True
    ) as workers:
        (engine,) = engines(workers).values()
        engine.look = buffers
        workers.run()
        assert part < engine.most <= 4 * part
        assert len(engine.loaded) == 12
        gc.collect()
        assert buffers() == 0


@pytest.mark.parametrize(
    "placement", [{"policy": [0], "rollout": [1]}, {"policy": [0, 1, 2], "rollout": [1, 2, 3]}]
)
def test_no_worker_holds_more_than_a_few_parts(source, placement):
    part, largest = 40_000, 64 * 64 * 4
    with pool(source, placement, [(64, 64)] * 80, part) as workers:
        published = 0
        arenas = [databuffer.arena for databuffer in workers.databuffers.values()]
        for engine in engines(
            workers
        ).values():  # what several engines read lies with those who made it
            engine.look = lambda: max(arena.in_use for arena in arenas)
        buffer = workers.databuffers["w0"]
        publish = buffer.publish

        async def watched(*args):
            nonlocal published
            await publish(*args)
            published = max(published, buffer.unacked_bytes)

        buffer.publish = watched
        workers.run()
        overhead = 2000  # of names, shapes and alignment
        for engine in engines(workers).values():
            assert (
                largest
                < engine.most
                <= (3 if len(placement["rollout"]) == 1 else 4) * (part + overhead)
            )
        assert 0 < published <= 4 * (part + overhead)
        assert_nothing_is_held(workers)


def test_an_engine_that_is_put_to_sleep_is_told_whether_weights_follow(source):
    roles = (
        Role("policy", partial(build, kind=Holder, options={"shapes": [(4,)]})),
        Role("rollout", partial(build, kind=Collector, options={})),
    )
    nodes = (
        Node("before", computes, role="policy"),
        Node("weights", publish_weights, role="policy", after="before"),
        Node("load", load_weights, role="rollout", after="weights", rows=Rows.REPLICATED),
        Node("after", computes, role="policy", after="before"),
    )
    plan = compile_chains(
        DAG(roles, nodes), ["w0", "w1"], source_schema(open_source(source).schema, source)
    )
    with LocalPool(plan, source, url="", stream_bytes=100) as workers:
        for step in (1, 2):
            workers.run(step)
        assert [engine.slept for engine in engines(workers).values()] == [
            [{"weights_follow": True}, {}] * 2
        ] * 2


APART, TOGETHER, OVER = (
    {"policy": [0, 1], "rollout": [2, 3]},
    {"policy": [0, 1], "rollout": [0, 1]},
    {"policy": [0, 1], "rollout": [1, 2]},
)


@pytest.mark.parametrize(
    ("placement", "broadcast"),
    [
        (APART, True),
        (APART, False),
        (TOGETHER, False),
        (OVER, False),
        ({"policy": [0], "rollout": [0]}, False),
    ],
)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            {"trainer": {"fails_at": 5}},
            "node 'weights', train step 1, worker 'w.': ZeroDivisionError: in the middle",
        ),
        (
            {"trainer": {"changes": True}},
            r"node 'weights'.* weights\(\) gave .*where .* was before",
        ),
        (
            {"engine": {"fails_at": 5}},
            "node 'load', train step 1, worker 'w.': ZeroDivisionError: while loading",
        ),
    ],
)
def test_a_failure_on_the_way_is_named_and_stops_everyone(
    source, placement, broadcast, broken, said
):
    with (
        pool(source, placement, [(40,)] * 12, 300, broadcast=broadcast, **broken) as workers,
        pytest.raises(NodeError, match=said),
    ):
        workers.run()


@pytest.mark.parametrize(("placement", "broadcast"), [(OVER, False), (APART, True)])
def test_a_reader_that_stops_early_holds_nobody_up(source, placement, broadcast):
    with pool(
        source, placement, [(40,)] * 12, 300, engine={"takes": 3}, broadcast=broadcast
    ) as workers:
        for step in (1, 2):
            workers.run(step)
        assert {tuple(engine.loaded) for engine in engines(workers).values()} == {
            ("p0", "p1", "p2")
        }
        assert_nothing_is_held(workers)


def test_a_node_of_ones_own_still_reads_the_weights_as_rows(source):
    with pool(source, OVER, [(40,), (3, 2)] * 6, 300, reader=lengths) as workers:
        assert not workers.plan.streams
        workers.run()
        expected = {name: tensor.nbytes for name, tensor in Holder([(40,), (3, 2)] * 6).weights()}
        assert all(engine.loaded == expected for engine in engines(workers).values())


@pytest.mark.parametrize("reader", [load_weights, lengths])
@pytest.mark.parametrize("part", [300, 5000])
def test_weights_cross_the_link_to_a_host_once(source, reader, part):
    hosts = {"w0": "a", "w1": "a", "w2": "b", "w3": "b", "w4": "b", "w5": "c", "w6": "c"}
    placement = {"policy": [0, 1], "rollout": [1, 2, 3, 4, 5, 6]}
    with pool(source, placement, [(1000,)] * 10, part, reader=reader, hosts=hosts) as workers:
        metrics = workers.run()
        expected = dict(Holder([(1000,)] * 10).weights())
        size = sum(tensor.nbytes for tensor in expected.values())
        assert all(list(engine.loaded) == list(expected) for engine in engines(workers).values())
        assert 2 * size <= metrics["bytes/hosts"].value < 2 * size + 10_000
        assert metrics["bytes/peers"].value > 5 * size, "the others took it from their neighbours"
        del expected
        assert_nothing_is_held(workers)


def test_bytes_are_counted_once(source):
    with pool(source, APART, [(1000,)] * 10, 5000) as workers:
        metrics = workers.run()
        size = sum(tensor.nbytes for _, tensor in Holder([(1000,)] * 10).weights())
        assert 2 * size <= metrics["bytes/peers"].value < 2 * size + 20_000
        assert {"seconds/weights", "seconds/load", "seconds/weights->load"} <= metrics.keys()
