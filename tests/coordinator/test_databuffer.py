import asyncio

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator import databuffer as module
from siirl_dask.coordinator.databuffer import Databuffer
from siirl_dask.coordinator.frames import from_frames
from siirl_dask.coordinator.messages import Request, TransitionKey, Turn
from siirl_dask.errors import Aborted, PeerError
from siirl_dask.planner import Edge, Rows
from siirl_dask.testing.pool import LocalTransport

SCHEMA = pa.schema(
    {
        "row_id": pa.int64(),
        "group_id": pa.int64(),
        "tokens": pa.int64(),
        "ids": pa.list_(pa.int32()),
        "minibatch": pa.int32(),
    }
)
TURN = Turn("train", 1, 0)


def names(count, first=0):
    return tuple(str(first + i) for i in range(count))


def edge(sources, targets, rows, *, by_minibatch=False, source="a", guide="a", schema=SCHEMA):
    return Edge(source, "b", sources, targets, rows, by_minibatch, schema, guide)


def make_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, count)
    columns = {
        "row_id": np.arange(count),
        "group_id": np.arange(count) // 3,
        "tokens": lengths,
        "ids": [list(range(n)) for n in lengths],
        "minibatch": np.arange(count) // 3 % 2,
    }
    return pa.table(columns, schema=SCHEMA)


def scatter(table, sources, seed=0):
    """Rows on random sources, in random order."""
    rng = np.random.default_rng(seed)
    order, owner = rng.permutation(table.num_rows), rng.integers(0, len(sources), table.num_rows)
    return {source: table.take(order[owner == index]) for index, source in enumerate(sources)}


def buffers_of(edges):
    transport = LocalTransport({})
    workers = {worker for e in edges for worker in (*e.sources, *e.targets)}
    buffers = {w: Databuffer("run", w, {f"train/{e.name}": e for e in edges}, transport) for w in workers}
    transport.handlers.update({w: buffer.handle for w, buffer in buffers.items()})
    return buffers, transport


async def move(e, parts, delay=None):
    """Publish in random order while the targets already ask."""
    buffers, transport = buffers_of([e])
    pulls = {target: asyncio.create_task(buffers[target].pull(e, e, TURN)) for target in e.targets}
    for source in sorted(e.sources, key=lambda s: hash((s, delay))):
        await asyncio.sleep(0)
        await buffers[source].publish(e, TURN, parts[source])
    got = {target: await pull for target, pull in pulls.items()}
    return got, buffers, transport


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(-3, 3),
    st.sampled_from([r for r in Rows if r != Rows.REPLICATED]),
    st.integers(0, 40), st.integers(0, 9),
)  # fmt: skip
def test_any_degree_to_any_degree_moves_each_row_once_and_leaves_nothing_behind(s, t, shift, rows, count, seed):
    e = edge(names(s), names(t, max(0, shift)), rows, by_minibatch=rows is Rows.BALANCED)
    table = make_rows(count, seed)
    got, buffers, _ = asyncio.run(move(e, scatter(table, e.sources, seed), seed))
    assert pa.concat_tables(got.values()).sort_by("row_id").equals(table)
    for part in got.values():
        assert part.schema.equals(SCHEMA)
        assert part["row_id"].to_pylist() == sorted(part["row_id"].to_pylist())
    held = [slot.result().table for buffer in buffers.values() for slot in buffer._published.values()]
    assert held == [None] * len(e.sources)
    if rows is Rows.GROUPED:
        groups = [set(part["group_id"].to_pylist()) for part in got.values()]
        assert sum(map(len, groups)) == len(set.union(*groups))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
@settings(deadline=None, max_examples=20)
def test_replicated_rows_reach_every_target(s, t, count):
    e = edge(names(s), names(t), Rows.REPLICATED)
    table = make_rows(count)
    got, _, _ = asyncio.run(move(e, scatter(table, e.sources)))
    assert all(part.equals(table) for part in got.values())


def test_the_layout_does_not_depend_on_which_source_held_a_row():
    table = make_rows(30)
    e = edge(names(3), names(4, 10), Rows.BALANCED)
    one, _, _ = asyncio.run(move(e, scatter(table, e.sources, 1)))
    other, _, _ = asyncio.run(move(e, scatter(table, e.sources, 2)))
    assert one == other


def test_rows_that_may_be_anywhere_stay_when_their_worker_is_a_target():
    e = edge(names(3), names(2), Rows.ANYWHERE)
    parts = scatter(make_rows(30), e.sources)
    got, _, _ = asyncio.run(move(e, parts))
    for worker in e.targets:
        assert set(parts[worker]["row_id"].to_pylist()) <= set(got[worker]["row_id"].to_pylist())


def test_a_row_that_several_sources_hold_moves_once():
    e = edge(names(3), names(2, 5), Rows.BALANCED)
    table = make_rows(12)
    got, _, _ = asyncio.run(move(e, dict.fromkeys(e.sources, table)))
    assert pa.concat_tables(got.values()).sort_by("row_id").equals(table)


def test_a_join_lays_all_edges_out_by_the_one_that_guides():
    narrow = pa.schema([SCHEMA.field(name) for name in ("row_id", "group_id", "tokens")])
    guide = edge(names(2), names(3), Rows.BALANCED, by_minibatch=True)
    other = edge(names(4), names(3), Rows.BALANCED, by_minibatch=True, source="c", schema=narrow)
    table = make_rows(20)

    async def both():
        buffers, _ = buffers_of([guide, other])
        for e, seed in ((guide, 1), (other, 2)):
            for source, part in scatter(table, e.sources, seed).items():
                await buffers[source].publish(e, TURN, part.drop(["minibatch"]) if e is other else part)
        return [
            [await buffers[t].pull(guide, guide, TURN), await buffers[t].pull(other, guide, TURN)]
            for t in guide.targets
        ]

    for wide_part, narrow_part in asyncio.run(both()):
        assert wide_part["row_id"].equals(narrow_part["row_id"])


@pytest.mark.parametrize("count", [1, 16, 17, 18, 40, 300])
def test_statistics_reach_everyone_over_the_tree(count):
    e = edge(names(count), names(3), Rows.BALANCED)
    table = make_rows(count * 2)
    parts = {source: table.slice(2 * i, 2) for i, source in enumerate(e.sources)}
    got, _, _ = asyncio.run(move(e, parts))
    assert pa.concat_tables(got.values()).sort_by("row_id").equals(table)


def test_a_reply_is_bounded_and_the_rest_is_asked_for(monkeypatch):
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 2_000)
    e = edge(("0",), ("1",), Rows.BALANCED)
    table = make_rows(200)
    asked = []

    async def counted():
        buffers, transport = buffers_of([e])
        handle = transport.handlers["0"]

        async def spy(request):
            reply = await handle(request)
            if request.op == "rows":
                asked.append(sum(memoryview(frame).nbytes for frame in reply.frames))
            return reply

        transport.handlers["0"] = spy
        await buffers["0"].publish(e, TURN, table)
        return await buffers["1"].pull(e, e, TURN)

    assert asyncio.run(counted()).equals(table)
    assert len(asked) > 5
    assert max(asked) < 4_000


def test_asking_again_gives_the_same_rows_until_they_are_released():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def ask_twice():
        buffers, transport = buffers_of([e])
        await buffers["0"].publish(e, TURN, make_rows(5))
        request = Request("rows", buffers["0"].key(e, TURN), [1, 3])
        return [from_frames(r.header, r.frames, SCHEMA) for r in [await transport.request("0", request) for _ in "ab"]]

    first, second = asyncio.run(ask_twice())
    assert first.equals(second)


@pytest.mark.parametrize("rows", [[99], [-1], [], [[0]]])
def test_rows_that_were_not_published_are_refused(rows):
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def ask():
        buffers, transport = buffers_of([e])
        await buffers["0"].publish(e, TURN, make_rows(5))
        await transport.request("0", Request("rows", buffers["0"].key(e, TURN), rows))

    with pytest.raises(PeerError):
        asyncio.run(ask())


@pytest.mark.parametrize("key", [TransitionKey("other", 0, "train/a->b"), TransitionKey("run", 0, "train/x->y")])
def test_a_request_of_another_run_or_edge_is_refused(key):
    async def ask():
        buffers, _ = buffers_of([edge(("0",), ("1",), Rows.BALANCED)])
        await buffers["0"].handle(Request("rows", key, [0]))

    with pytest.raises(PeerError, match="refused"):
        asyncio.run(ask())


def test_an_abort_wakes_every_wait_now_and_later():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def wait():
        buffers, _ = buffers_of([e])
        waiting = asyncio.create_task(buffers["1"].pull(e, e, TURN))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for buffer in buffers.values():
            buffer.abort("worker '7' died")
        with pytest.raises(Aborted, match="worker '7' died"):
            await waiting
        with pytest.raises(Aborted):
            await buffers["1"].pull(e, e, Turn("train", 2, 1))

    asyncio.run(wait())


def test_forgetting_a_turn_frees_what_it_published_and_gathered():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def forget():
        buffers, _ = buffers_of([e])
        await buffers["0"].publish(e, TURN, make_rows(5))
        await buffers["1"].pull(e, e, TURN)
        for buffer in buffers.values():
            buffer.forget(1)
        return [buffer._published for buffer in buffers.values()], [b._exchange._asked for b in buffers.values()]

    published, asked = asyncio.run(forget())
    assert published == [{}, {}]
    assert asked == [{}, {}]


def test_a_join_whose_branches_hold_different_rows_says_which_are_missing():
    guide, other = edge(("0",), ("1",), Rows.BALANCED), edge(("0",), ("1",), Rows.BALANCED, source="c")

    async def join():
        buffers, _ = buffers_of([guide, other])
        await buffers["0"].publish(guide, TURN, make_rows(5))
        await buffers["0"].publish(other, TURN, make_rows(3))
        await buffers["1"].pull(other, guide, TURN)

    with pytest.raises(PeerError, match="2 rows that 'a' has are not among those of 'c'"):
        asyncio.run(join())
