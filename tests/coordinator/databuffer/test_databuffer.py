import asyncio

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.config import Way
from siirl_dask.coordinator.databuffer import Databuffer
from siirl_dask.coordinator.limits import Limits
from siirl_dask.coordinator.messages import Op, Request, TransitionKey, Turn, pack_ints
from siirl_dask.errors import Aborted, DataError, PeerError
from siirl_dask.planner import Edge, Rows
from siirl_dask.testing.pool import LocalTransport

SCHEMA = pa.schema(
    {
        "row_id": pa.int64(),
        "group_id": pa.int64(),
        "tokens": pa.int64(),
        "ids": pa.list_(pa.int32()),
        "minibatch": pa.int32(),
        "logprobs": pa.large_list(pa.float64()),
        "pair": pa.list_(pa.float32(), 2),
        "text": pa.string(),
        "image": pa.large_binary(),
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "maybe": pa.list_(pa.int16()),
    }
)
TURN = Turn("train", 1, 0)
SMALL = Limits(memory=2**20, chunk=200, described=0)
WAYS = {
    "large messages": {"limits": Limits(), "way": Way.dask},
    "messages": {"limits": SMALL, "way": Way.dask},
    "shared memory": {"limits": SMALL, "way": Way.shm},
}
LENT = {"limits": Limits(lend_from=0), "way": Way.shm}


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
        "logprobs": [rng.normal(size=n) for n in lengths],
        "pair": [[n, -n] for n in lengths],
        "text": ["é" * n for n in lengths],
        "image": [bytes(rng.bytes(n)) for n in lengths],
        "messages": [[{"role": "user", "content": "x" * n}] * (n % 3) for n in lengths],
        "maybe": [None if n % 4 == 1 else [n] * n for n in lengths],
    }
    return pa.table(columns, schema=SCHEMA)


def scatter(table, sources, seed=0):
    """Rows on random sources, in random order."""
    rng = np.random.default_rng(seed)
    order, owner = rng.permutation(table.num_rows), rng.integers(0, len(sources), table.num_rows)
    return {source: table.take(order[owner == index]) for index, source in enumerate(sources)}


def buffers_of(edges, way="large messages", **settings):
    transport = LocalTransport({})
    workers = {worker for e in edges for worker in (*e.sources, *e.targets)}
    keyed = {f"train/{e.name}": e for e in edges}
    buffers = {w: Databuffer("run", w, keyed, transport, **((WAYS | {"lent": LENT})[way] | settings)) for w in workers}
    transport.handlers.update({w: buffer.handle for w, buffer in buffers.items()})
    return buffers, transport


async def settle(buffers):
    for buffer in buffers.values():
        await buffer.settle()


async def move(e, parts, way="large messages", delay=None):
    """Publish in random order while the targets already ask."""
    buffers, transport = buffers_of([e], way)
    pulls = {target: asyncio.create_task(buffers[target].pull(e, e, TURN)) for target in e.targets}
    for source in sorted(e.sources, key=lambda s: hash((s, delay))):
        await asyncio.sleep(0)
        await buffers[source].publish(e, TURN, parts[source])
    got = {target: await pull for target, pull in pulls.items()}
    await settle(buffers)
    return got, buffers, transport


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(-3, 3),
    st.sampled_from([r for r in Rows if r != Rows.REPLICATED]),
    st.integers(0, 40), st.integers(0, 9), st.sampled_from(list(WAYS)),
)  # fmt: skip
def test_any_degree_to_any_degree_moves_each_row_once_and_leaves_nothing_behind(s, t, shift, rows, count, seed, way):
    e = edge(names(s), names(t, max(0, shift)), rows, by_minibatch=rows is Rows.BALANCED)
    table = make_rows(count, seed)
    got, buffers, _ = asyncio.run(move(e, scatter(table, e.sources, seed), way, seed))
    assert pa.concat_tables(got.values()).sort_by("row_id").equals(table)
    for part in got.values():
        assert part.schema.equals(SCHEMA)
        assert part["row_id"].to_pylist() == sorted(part["row_id"].to_pylist())
        part.validate(full=True)
    if rows is Rows.GROUPED:
        groups = [set(part["group_id"].to_pylist()) for part in got.values()]
        assert sum(map(len, groups)) == len(set.union(*groups))
    assert [buffer.waiting for buffer in buffers.values()] == [0] * len(buffers)
    del part, got
    assert [buffer.arena.in_use for buffer in buffers.values()] == [0] * len(buffers)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 20), st.sampled_from([*WAYS, "lent"]))
@settings(deadline=None, max_examples=30)
def test_replicated_rows_reach_every_target(s, t, count, way):
    e = edge(names(s), names(t), Rows.REPLICATED)
    table = make_rows(count)
    got, _, _ = asyncio.run(move(e, scatter(table, e.sources), way))
    assert all(part.equals(table) for part in got.values())


@pytest.mark.parametrize("way", ["large messages", "messages"])
def test_every_way_gives_the_same_tables(way):
    table, e = make_rows(30), edge(names(3), names(4, 2), Rows.BALANCED)
    one, _, _ = asyncio.run(move(e, scatter(table, e.sources), way))
    other, buffers, _ = asyncio.run(move(e, scatter(table, e.sources), "shared memory"))
    assert one == other
    assert all(buffers[target].traffic.shared_memory > 0 for target in e.targets[1:])


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


def test_a_message_is_bounded_and_the_rest_is_asked_for():
    e = edge(("0",), ("1",), Rows.BALANCED)
    table = make_rows(200)
    asked = []

    async def counted():
        buffers, transport = buffers_of([e], "messages", limits=Limits(chunk=2_000))
        handle = transport.handlers["0"]

        async def spy(request):
            reply = await handle(request)
            if request.op == Op.FILL:
                asked.append(reply.nbytes)
            return reply

        transport.handlers["0"] = spy
        await buffers["0"].publish(e, TURN, table)
        return await buffers["1"].pull(e, e, TURN)

    assert asyncio.run(counted()).equals(table)
    assert len(asked) > 5
    assert max(asked) <= 2 * 2_000  # plain columns and runs of bytes, each bounded


def test_a_row_larger_than_a_message_travels_a_column_at_a_time():
    e, table = edge(("0",), ("1",), Rows.BALANCED), make_rows(30)

    async def pulled():
        buffers, _ = buffers_of([e], "messages", limits=Limits(chunk=1))
        await buffers["0"].publish(e, TURN, table)
        return await buffers["1"].pull(e, e, TURN)

    assert asyncio.run(pulled()).equals(table)


def test_asking_again_gives_the_same_rows_until_they_are_released():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def ask_twice():
        buffers, transport = buffers_of([e])
        await buffers["0"].publish(e, TURN, make_rows(5))
        request = Request(Op.DESCRIBE, buffers["0"].key(e, TURN), {"rows": pack_ints(np.array([1, 3]))})
        return [await transport.request("0", request) for _ in "ab"]

    first, second = asyncio.run(ask_twice())
    assert first == second


@pytest.mark.parametrize("op", [Op.DESCRIBE, Op.FILL])
@pytest.mark.parametrize("rows", [pack_ints(np.array([99])), pack_ints(np.array([-1])), b"", b"123", [0], None])
def test_rows_that_were_not_published_are_refused(rows, op):
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def ask():
        buffers, transport = buffers_of([e])
        await buffers["0"].publish(e, TURN, make_rows(5))
        await transport.request("0", Request(op, buffers["0"].key(e, TURN), {"rows": rows, "columns": ["ids"]}))

    with pytest.raises(PeerError):
        asyncio.run(ask())


@pytest.mark.parametrize("key", [TransitionKey("other", 0, "train/a->b"), TransitionKey("run", 0, "train/x->y")])
def test_a_request_of_another_run_or_edge_is_refused(key):
    async def ask():
        buffers, _ = buffers_of([edge(("0",), ("1",), Rows.BALANCED)])
        await buffers["0"].handle(Request(Op.DESCRIBE, key, {"rows": pack_ints(np.array([0]))}))

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
        await settle(buffers)
        for buffer in buffers.values():
            buffer.forget(1)
        return [buffer._slots for buffer in buffers.values()], [b._exchange._asked for b in buffers.values()]

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


@pytest.mark.parametrize("way", list(WAYS))
def test_a_table_in_many_chunks_moves_as_one_in_one(way):
    e, table = edge(("0", "2"), ("1",), Rows.BALANCED), make_rows(40)
    parts = scatter(table, e.sources)
    chunked = {s: pa.concat_tables([part.slice(i, 3) for i in range(0, len(part), 3)]) for s, part in parts.items()}
    got, _, _ = asyncio.run(move(e, chunked, way))
    assert got["1"].equals(table)


@pytest.mark.parametrize("way", list(WAYS))
def test_fixed_size_lists_with_nulls_on_one_source_only_meet_in_one_table(way):
    e, table = edge(("0", "2"), ("1",), Rows.BALANCED), make_rows(8)
    pairs = [[i, i] if i % 3 or i < 4 else None for i in range(8)]
    table = table.set_column(table.column_names.index("pair"), "pair", pa.array(pairs, SCHEMA.field("pair").type))
    got, _, _ = asyncio.run(move(e, {"0": table.slice(0, 4), "2": table.slice(4)}, way))
    assert got["1"].equals(table)


def test_a_column_that_cannot_travel_is_refused_before_anything_moves():
    schema = SCHEMA.append(pa.field("label", pa.dictionary(pa.int32(), pa.string())))
    with pytest.raises(DataError, match="label"):
        buffers_of([edge(("0",), ("1",), Rows.BALANCED, schema=schema)])


def test_memory_beyond_what_may_be_kept_is_given_back_when_a_turn_is_over():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def pull():
        buffers, _ = buffers_of([e], "shared memory")
        await buffers["0"].publish(e, TURN, make_rows(50))
        got = await buffers["1"].pull(e, e, TURN)
        held = buffers["1"].arena.held
        del got
        buffers["1"].forget(1)
        return held, buffers["1"].arena.held

    held, after = asyncio.run(pull())
    assert held > SMALL.memory
    assert after <= SMALL.memory // 2


def test_parts_of_a_table_are_published_taken_and_freed_each_by_itself():
    e, rows = edge(names(2), names(2, first=1), Rows.REPLICATED), make_rows(40)
    parts = [rows.slice(first, 10) for first in range(0, 40, 10)]

    async def work():
        buffers, _ = buffers_of([e], way="shared memory")
        for number, part in enumerate(parts):
            pulls = [asyncio.create_task(buffers[w].pull(e, e, TURN, number)) for w in e.targets]
            shares = scatter(part, e.sources, seed=number)
            for worker in e.sources:
                await buffers[worker].publish(e, TURN, shares[worker], number)
            assert [table.sort_by("row_id") for table in await asyncio.gather(*pulls)] == [part, part]
            await asyncio.gather(*(buffers[worker].until_taken(e, TURN, number) for worker in e.sources))
            assert [buffers[worker].waiting for worker in e.sources] == [0, 0]

    asyncio.run(work())


def test_who_waits_for_a_part_to_be_taken_waits_no_longer_than_is_allowed_and_hears_an_abort():
    e, rows = edge(names(1), names(2, first=1), Rows.REPLICATED), make_rows(10)

    async def work():
        buffers, _ = buffers_of([e], stall_timeout=0.2)
        await buffers["0"].publish(e, TURN, rows, 0)
        await buffers["1"].pull(e, e, TURN, 0)
        with pytest.raises(PeerError, match=r"part 0: worker '0' still has 10 rows .* within 0\.2 s .*stall_timeout"):
            await buffers["0"].until_taken(e, TURN, 0)
        buffers, _ = buffers_of([e])
        await buffers["0"].publish(e, TURN, rows, 0)
        waiting = asyncio.create_task(buffers["0"].until_taken(e, TURN, 0))
        await asyncio.sleep(0)
        buffers["0"].abort("worker '2' died")
        with pytest.raises(Aborted, match="worker '2' died"):
            await asyncio.wait_for(waiting, 20)

    asyncio.run(work())
