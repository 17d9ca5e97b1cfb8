"""Peers may send anything: what is malformed is refused, and nothing is used before it is
checked.
"""

import asyncio
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.layout.assignment import STATISTICS
from siirl_dask.coordinator.transport.messages import Op, Reply, Request, TransitionKey, pack_ints
from siirl_dask.errors import PeerError
from siirl_dask.planner import Iteration, Rows
from tests.coordinator.rows import (
    ITERATION,
    SCHEMA,
    buffers_of,
    edge,
    make_rows,
    scatter,
    wait_for_acks,
)

EDGE = edge(("0",), ("1",), Rows.BALANCED)
TWO = edge(("0", "2"), ("1",), Rows.BALANCED)
SAME = edge(("0", "2"), ("1", "3"), Rows.REPLICATED)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(max_size=4)
    | st.binary(max_size=16)
)
anything = st.recursive(
    leaves, lambda item: st.lists(item) | st.dictionaries(st.text(max_size=4), item), max_leaves=8
)
rows = st.lists(st.integers(-3, 12), max_size=4).map(
    lambda values: pack_ints(np.array(values, np.int64))
)
targets = st.fixed_dictionaries(
    {"handles": anything, "columns": anything, "starts": st.lists(rows, max_size=3)}
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "rows": rows | anything,
        "columns": st.lists(st.sampled_from([*SCHEMA.names, "other"]), max_size=3) | anything,
        "others": st.booleans() | anything,
        "target": st.none() | targets | anything,
        "acks": st.lists(st.tuples(st.integers(), st.text(max_size=3), st.integers()).map(list))
        | anything,
    },
)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from([*Op, "other"]), bodies), min_size=1, max_size=5))
def test_any_request_is_answered_or_refused_and_the_next_is_served(requests):
    table = make_rows(10)

    async def ask():
        buffers, _ = buffers_of([EDGE], "messages")
        key = buffers["0"].key(EDGE, ITERATION)
        await buffers["0"].publish(EDGE, ITERATION, table)
        for op, body in requests:
            try:
                assert isinstance(await buffers["0"].handle(Request(op, key, body)), Reply)
            except PeerError:
                continue
        return await buffers["1"].pull(EDGE, EDGE, ITERATION)

    assert asyncio.run(ask()).equals(table)


@pytest.mark.parametrize("place", [-64, -(2**40), 2**40, 1.5, "0", None])
def test_rows_are_written_nowhere_but_into_the_askers_memory(place):
    """The request that a target sends, but for the first byte of each column in its segment."""
    table = make_rows(10)
    refused = []

    async def pull():
        buffers, transport = buffers_of([EDGE], "shared memory")
        handle = transport.handlers["0"]

        async def tried(request):
            target = request.body.get("target")
            if request.op == Op.FETCH and target is not None:
                columns = [[segment, place, layout] for segment, _, layout in target["columns"]]
                body = {**request.body, "target": {**target, "columns": columns}}
                with pytest.raises(PeerError, match="refused to write rows"):
                    await handle(replace(request, body=body))
                refused.append(place)
            return await handle(request)

        transport.handlers["0"] = tried
        await buffers["0"].publish(EDGE, ITERATION, table)
        return await buffers["1"].pull(EDGE, EDGE, ITERATION)

    assert asyncio.run(pull()).equals(table)
    assert refused


NASTY = [
    None, True, -1, 0, 1, 2, 9, 2**31, 2**63 - 1, -(2**63), 1.5, "", "ids", b"", b"x" * 16, [], [[]], [0], [1, -1],
    [[0, "", 0, {}, 0, None]], [[0, "", 0, {"ids": 0}, 0, None]], [[0, "", 0, {"other": 0}, 1, None]], {},
    {"rows": 3, "nodes": []}, [[0, "", 0, {"ids": 0}, 0, [[1, 3, 8192, b"0" * 16], {"ids": 4096}, 0, 0]]],
]  # fmt: skip


def damage(reply, seed):
    """Return a reply in which something of the header or of the frames is not what was sent."""
    rng = Random(seed)
    header, frames = dict(reply.header), [bytearray(frame) for frame in reply.frames]
    kind = rng.choice(["header", "key", "key", "cut", "flip", "flip", "drop", "more", "grow"])
    index = rng.randrange(len(frames)) if frames else 0
    if kind == "header":
        header = {rng.choice([*header, "x"]): rng.choice(NASTY)}
    elif kind == "key" and header:
        header[rng.choice(list(header))] = rng.choice(NASTY)
    elif kind == "more":
        frames.append(bytearray(rng.randbytes(rng.randrange(16))))
    elif kind == "drop" and frames:
        frames.pop(index)
    elif kind == "cut" and frames:
        frames[index] = frames[index][: rng.randrange(len(frames[index]) + 1)]
    elif kind == "grow" and frames:
        frames[index] += rng.randbytes(1 + rng.randrange(16))
    elif kind == "flip" and frames and frames[index]:
        frames[index][rng.randrange(len(frames[index]))] ^= rng.randrange(1, 256)
    return Reply(header, [bytes(frame) for frame in frames])


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.sampled_from([Op.SUBTREE_STATISTICS, Op.ROW_LENGTHS, Op.FETCH, Op.ALL_STATISTICS]),
    st.sampled_from([("messages", TWO), ("shared memory", TWO), ("shared tables", SAME)]),
)
def test_a_damaged_answer_is_refused_or_gives_a_valid_table(seed, op, case):
    table, (way, e) = make_rows(10), case

    async def pull():
        buffers, transport = buffers_of([e], way)

        async def lie(handle, request):
            reply = await handle(request)
            return damage(reply, seed) if request.op == op else reply

        for source, part in scatter(table, e.sources).items():
            transport.handlers[source] = partial(lie, transport.handlers[source])
            await buffers[source].publish(e, ITERATION, part)
        (got,) = await asyncio.gather(
            asyncio.wait_for(buffers["1"].pull(e, e, ITERATION), 20), return_exceptions=True
        )
        return got, buffers["1"]

    got, buffer = asyncio.run(pull())
    if isinstance(got, PeerError):
        assert "train step 1" in str(got)
    else:
        assert got.schema.equals(SCHEMA)
        got.validate(full=True)
        got.to_pylist()
    del got
    assert buffer.arena.in_use == 0


def pull_from_liar(change, way, limits=None, count=10):
    """Pull from a source whose every reply has the frames that ``change(request, frames)``
    returns.
    """

    async def pull():
        buffers, transport = buffers_of([EDGE], way, **({"limits": limits} if limits else {}))
        handle = transport.handlers["0"]

        async def changed(request):
            reply = await handle(request)
            return Reply(reply.header, change(request, [bytes(frame) for frame in reply.frames]))

        transport.handlers["0"] = changed
        await buffers["0"].publish(EDGE, ITERATION, make_rows(count))
        return await buffers["1"].pull(EDGE, EDGE, ITERATION)

    return asyncio.run(pull())


@pytest.mark.parametrize("length", [2**40, 2**47, 2**48 - 1])
def test_rows_larger_than_memory_are_refused_before_allocation(length):
    def boast(request, frames):
        return (
            [pack_ints(np.full(10, length))] * len(frames)
            if request.op == Op.ROW_LENGTHS
            else frames
        )

    with pytest.raises(PeerError, match="machine's memory"):
        pull_from_liar(boast, "messages")


@pytest.mark.parametrize("way", ["messages", "shared memory"])
def test_rows_said_to_be_longer_than_they_are_are_refused(way):
    def boast(request, frames):
        longer = request.op == Op.ROW_LENGTHS
        return [pack_ints(np.frombuffer(frame, "<i8") + 1) if longer else frame for frame in frames]

    with pytest.raises(PeerError, match=r"by the row lengths it told|told otherwise"):
        pull_from_liar(boast, way)


def test_asking_for_more_than_a_message_holds_is_refused():
    async def ask():
        buffers, _ = buffers_of([EDGE], "messages", limits=BufferLimits(message=100))
        await buffers["0"].publish(EDGE, ITERATION, make_rows(200))
        body = {"rows": pack_ints(np.arange(200)), "columns": ["ids"]}
        await buffers["0"].handle(Request(Op.FETCH, buffers["0"].key(EDGE, ITERATION), body))

    with pytest.raises(PeerError, match="expected at most 100"):
        asyncio.run(ask())


@pytest.mark.parametrize("way", ["messages", "shared memory"])
def test_a_late_write_after_a_cancelled_pull_spoils_nothing(way):
    """A pull is cancelled, the next iteration is pulled, and only then does a slow source answer
    the first request.
    """
    stale, table = make_rows(50, seed=1), make_rows(50, seed=2)
    before, later = Iteration("train", 0, 0), Iteration("train", 2, 2)
    now = Iteration("train", 1, 1)

    async def work():
        # memory is kept
        buffers, transport = buffers_of(
            [EDGE], way, limits=BufferLimits(message=200, inline_lengths=0)
        )
        await buffers["0"].publish(EDGE, before, stale)
        assert (await buffers["1"].pull(EDGE, EDGE, before)).equals(stale)
        handle, held, go = transport.handlers["0"], asyncio.Event(), asyncio.Event()
        late = []

        async def hold(request):
            await go.wait()
            return await handle(request)

        async def slow(request):
            if request.op != Op.FETCH or held.is_set():
                return await handle(request)
            held.set()
            late.append(asyncio.create_task(hold(request)))
            return await asyncio.shield(late[0])

        transport.handlers["0"] = slow
        await buffers["0"].publish(EDGE, now, stale)
        await buffers["0"].publish(EDGE, later, table)
        first = asyncio.create_task(buffers["1"].pull(EDGE, EDGE, now))
        await held.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        got = await buffers["1"].pull(EDGE, EDGE, later)
        go.set()
        assert (await late[0]).header["rows"] > 0  # it did write, or send
        assert got.equals(table)
        await wait_for_acks(buffers)
        return buffers["1"]

    assert asyncio.run(work()).arena.in_use == 0


def test_a_key_of_another_run_is_refused():
    async def ask():
        buffers, _ = buffers_of([EDGE], "messages")
        await buffers["0"].publish(EDGE, ITERATION, make_rows(5))
        key = TransitionKey("run-before", ITERATION.sequence, f"train/{EDGE.name}")
        await buffers["0"].handle(
            Request(Op.FETCH, key, {"rows": pack_ints(np.arange(5)), "columns": ["ids"]})
        )

    with pytest.raises(PeerError, match="refused"):
        asyncio.run(ask())


def test_statistics_that_point_outside_of_the_edge_are_refused():
    def point_elsewhere(request, frames):
        if request.op != Op.ALL_STATISTICS:
            return frames
        statistics = np.frombuffer(frames[0], STATISTICS).copy()
        statistics["source"] = 7
        return [statistics.tobytes(), *frames[1:]]

    with pytest.raises(PeerError, match="source from 7 to 7"):
        pull_from_liar(point_elsewhere, "messages")


def test_text_that_is_not_utf8_is_refused():
    def spoil(request, frames):
        return [frame.replace("é".encode(), b"\xff\xff") for frame in frames]

    with pytest.raises(PeerError, match=r"is no table|UTF"):
        pull_from_liar(spoil, "large messages", count=30)


@pytest.mark.parametrize(
    "op", [Op.FETCH, Op.SUBTREE_STATISTICS, Op.ALL_STATISTICS, Op.PASSED_ON, Op.EARLY]
)
@pytest.mark.parametrize(
    ("sequence", "name"),
    [
        (2**40, "{}"), (-1, "{}"), (100, "{}"), (0, "{}/17"), (0, "{}/00"), (0, "{}/-1"), (0, "{}/" + "9" * 5000),
        (0, "{}/²"), (0, "{}@1"), (0, "{}@" + "9" * 5000), (0, "{}/0@7"), (0, "{}@0@0"), (0, "{}/1/1"), (0, "other"),
        (0, "x" * 2**20),
    ],
)  # fmt: skip
def test_a_key_that_no_plan_has_is_refused_at_once_and_nothing_waits_for_it(op, sequence, name):
    async def ask():
        buffers, _ = buffers_of([EDGE], "messages")
        key = TransitionKey("run", sequence, name.format(f"train/{EDGE.name}"))
        await asyncio.wait_for(
            buffers["0"].handle(Request(op, key, {"rows": pack_ints(np.arange(1))})), 5
        )

    with pytest.raises(PeerError, match=r"refused|asked for early") as refused:
        asyncio.run(ask())
    assert len(str(refused.value)) < 300
