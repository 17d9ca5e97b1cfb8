import asyncio
import gc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.shares import GatheredStatistics
from siirl_dask.coordinator.layout.assignment import row_statistics
from siirl_dask.coordinator.transport.messages import Op, Request, TransitionKey, pack_ints
from siirl_dask.errors import Aborted, DataError, PeerError
from siirl_dask.planner import Iteration, Rows
from tests.coordinator.rows import (
    ITERATION,
    SCHEMA,
    SMALL,
    WAYS,
    buffers_of,
    edge,
    make_rows,
    move,
    names,
    scatter,
    wait_for_acks,
)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(-3, 3),
    st.sampled_from([r for r in Rows if r != Rows.REPLICATED]),
    st.integers(0, 40), st.integers(0, 9), st.sampled_from(list(WAYS)),
)  # fmt: skip
def test_each_row_arrives_once_and_nothing_is_left_behind(s, t, shift, rows, count, seed, way):
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
    assert [buffer.unacked_bytes for buffer in buffers.values()] == [0] * len(buffers)
    del part, got
    assert [buffer.arena.in_use for buffer in buffers.values()] == [0] * len(buffers)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_share_a_blob_are_published_without_copies_of_it(way):
    """As the samples of a prompt with an image are: each is a slice of the one that the prompt
    has.
    """
    blobs = pa.array([bytes([number]) * 2**14 for number in range(16)], pa.large_binary())
    shared = pa.chunked_array([blobs.slice(row // 8, 1) for row in range(128)])
    table = make_rows(128)
    table = table.set_column(table.column_names.index("image"), "image", shared)
    whole = table.combine_chunks()
    e = edge(("0",), ("1", "2"), Rows.BALANCED)
    published = Published(row_statistics(table, 0), table, table.num_rows)
    assert published.nbytes < blobs.nbytes + 2**16 < whole["image"].nbytes / 4
    before = pa.total_allocated_bytes()
    published.columns()
    assert pa.total_allocated_bytes() - before < 2**16
    got, _, _ = asyncio.run(move(e, {"0": table}, way))
    assert pa.concat_tables(got.values()).sort_by("row_id").equals(whole)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 20),
    st.sampled_from([*WAYS, "shared tables"]),
)
@settings(deadline=None, max_examples=30)
def test_replicated_rows_reach_every_target(s, t, count, way):
    e = edge(names(s), names(t), Rows.REPLICATED)
    table = make_rows(count)
    got, _, _ = asyncio.run(move(e, scatter(table, e.sources), way))
    assert all(part.equals(table) for part in got.values())


@pytest.mark.parametrize("way", ["large messages", "messages"])
def test_messages_and_shared_memory_give_the_same_tables(way):
    table, e = make_rows(30), edge(names(3), names(4, 2), Rows.BALANCED)
    one, _, _ = asyncio.run(move(e, scatter(table, e.sources), way))
    other, buffers, _ = asyncio.run(move(e, scatter(table, e.sources), "shared memory"))
    assert one == other
    assert all(buffers[target].traffic.shared_memory > 0 for target in e.targets[1:])


def test_rows_that_may_be_anywhere_stay_with_a_source_that_is_a_target():
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


def test_edges_of_a_join_give_each_worker_the_same_rows():
    narrow = pa.schema([SCHEMA.field(name) for name in ("row_id", "group_id", "tokens")])
    guide = edge(names(2), names(3), Rows.BALANCED, by_minibatch=True)
    other = edge(names(4), names(3), Rows.BALANCED, by_minibatch=True, source="c", schema=narrow)
    table = make_rows(20)

    async def both():
        buffers, _ = buffers_of([guide, other])
        for e, seed in ((guide, 1), (other, 2)):
            for source, part in scatter(table, e.sources, seed).items():
                await buffers[source].publish(
                    e, ITERATION, part.drop(["minibatch"]) if e is other else part
                )
        return [
            [
                await buffers[t].pull(guide, guide, ITERATION),
                await buffers[t].pull(other, guide, ITERATION),
            ]
            for t in guide.targets
        ]

    for wide_part, narrow_part in asyncio.run(both()):
        assert wide_part["row_id"].equals(narrow_part["row_id"])


@pytest.mark.parametrize("count", [1, 16, 17, 18, 40, 300])
def test_statistics_reach_everyone_over_trees_of_any_depth(count):
    e = edge(names(count), names(3), Rows.BALANCED)
    table = make_rows(count * 2)
    parts = {source: table.slice(2 * i, 2) for i, source in enumerate(e.sources)}
    got, _, _ = asyncio.run(move(e, parts))
    assert pa.concat_tables(got.values()).sort_by("row_id").equals(table)


def test_messages_are_bounded_and_the_rest_is_asked_for():
    e = edge(("0",), ("1",), Rows.BALANCED)
    table = make_rows(200)
    sizes = []

    async def counted():
        buffers, transport = buffers_of([e], "messages", limits=BufferLimits(message=2_000))
        handle = transport.handlers["0"]

        async def spy(request):
            reply = await handle(request)
            if request.op == Op.FETCH:
                sizes.append(reply.nbytes)
            return reply

        transport.handlers["0"] = spy
        await buffers["0"].publish(e, ITERATION, table)
        return await buffers["1"].pull(e, e, ITERATION)

    assert asyncio.run(counted()).equals(table)
    assert len(sizes) > 5
    assert max(sizes) <= 2 * 2_000  # variable-length columns and other ones, each bounded


def test_a_row_larger_than_a_message_arrives():
    e, table = edge(("0",), ("1",), Rows.BALANCED), make_rows(30)

    async def pulled():
        buffers, _ = buffers_of([e], "messages", limits=BufferLimits(message=1))
        await buffers["0"].publish(e, ITERATION, table)
        return await buffers["1"].pull(e, e, ITERATION)

    assert asyncio.run(pulled()).equals(table)


def test_asking_again_gives_the_same_answer():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def ask_twice():
        buffers, transport = buffers_of([e])
        await buffers["0"].publish(e, ITERATION, make_rows(5))
        request = Request(
            Op.ROW_LENGTHS, buffers["0"].key(e, ITERATION), {"rows": pack_ints(np.array([1, 3]))}
        )
        return [await transport.request("0", request) for _ in "ab"]

    first, second = asyncio.run(ask_twice())
    assert first == second


@pytest.mark.parametrize("op", [Op.ROW_LENGTHS, Op.FETCH])
@pytest.mark.parametrize(
    "rows", [pack_ints(np.array([99])), pack_ints(np.array([-1])), b"", b"123", [0], None]
)
def test_requests_for_rows_that_were_not_published_are_refused(rows, op):
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def ask():
        buffers, transport = buffers_of([e])
        await buffers["0"].publish(e, ITERATION, make_rows(5))
        await transport.request(
            "0", Request(op, buffers["0"].key(e, ITERATION), {"rows": rows, "columns": ["ids"]})
        )

    with pytest.raises(PeerError):
        asyncio.run(ask())


@pytest.mark.parametrize(
    "key", [TransitionKey("other", 0, "train/a->b"), TransitionKey("run", 0, "train/x->y")]
)
def test_a_request_of_another_run_or_edge_is_refused(key):
    async def ask():
        buffers, _ = buffers_of([edge(("0",), ("1",), Rows.BALANCED)])
        await buffers["0"].handle(Request(Op.ROW_LENGTHS, key, {"rows": pack_ints(np.array([0]))}))

    with pytest.raises(PeerError, match="refused"):
        asyncio.run(ask())


def test_an_abort_wakes_every_wait_now_and_later():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def wait():
        buffers, _ = buffers_of([e])
        waiting = asyncio.create_task(buffers["1"].pull(e, e, ITERATION))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for buffer in buffers.values():
            buffer.abort("worker '7' died")
        with pytest.raises(Aborted, match="worker '7' died"):
            await waiting
        with pytest.raises(Aborted):
            await buffers["1"].pull(e, e, Iteration("train", 2, 1))

    asyncio.run(wait())


def test_forgetting_a_turn_frees_its_rows_and_statistics():
    e = edge(("0",), ("1", "2"), Rows.BALANCED)

    async def forget():
        before = alive(Published), alive(GatheredStatistics)
        buffers, transport = buffers_of([e])
        await buffers["0"].publish(e, ITERATION, make_rows(5))
        await buffers["1"].pull(e, e, ITERATION)  # worker 2 never does, so its rows are not acked
        await wait_for_acks(buffers)
        assert buffers["0"].unacked_bytes > 0
        assert alive(Published) > before[0]
        assert alive(GatheredStatistics) > before[1]
        for buffer in buffers.values():
            buffer.forget(ITERATION.sequence + 1)
        await asyncio.sleep(0)
        assert buffers["0"].unacked_bytes == 0
        assert alive(Published) <= before[0]
        assert alive(GatheredStatistics) <= before[1]
        for op in (Op.ALL_STATISTICS, Op.FETCH):
            with pytest.raises(PeerError, match="every worker has completed that iteration"):
                await transport.request("0", Request(op, buffers["0"].key(e, ITERATION)))

    asyncio.run(forget())


@pytest.mark.parametrize("way", list(WAYS))
def test_forgetting_what_came_before_leaves_the_iteration_that_is_under_way(way):
    """One target waits before the rows are published, the other asks after they were."""
    e, table, now = (
        edge(("0",), ("1", "2"), Rows.REPLICATED),
        make_rows(5),
        Iteration("train", 2, 1),
    )

    async def work():
        buffers, _ = buffers_of([e], way)

        def forget():
            for buffer in buffers.values():
                buffer.forget(now.sequence)

        early = asyncio.create_task(buffers["1"].pull(e, e, now))
        await asyncio.sleep(0.01)
        forget()
        await buffers["0"].publish(e, now, table)
        forget()
        pulled = [await asyncio.wait_for(early, 20)]
        forget()
        pulled.append(await buffers["2"].pull(e, e, now))
        return pulled

    assert all(got.equals(table) for got in asyncio.run(work()))


def alive(kind):
    """Return how many objects of a class exist."""
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())


def test_a_join_of_different_rows_says_which_are_missing():
    guide, other = (
        edge(("0",), ("1",), Rows.BALANCED),
        edge(("0",), ("1",), Rows.BALANCED, source="c"),
    )

    async def join():
        buffers, _ = buffers_of([guide, other])
        await buffers["0"].publish(guide, ITERATION, make_rows(5))
        await buffers["0"].publish(other, ITERATION, make_rows(3))
        await buffers["1"].pull(other, guide, ITERATION)

    with pytest.raises(PeerError, match="2 rows that 'a' has are not among those of 'c'"):
        asyncio.run(join())


@pytest.mark.parametrize("way", list(WAYS))
def test_a_table_in_many_chunks_arrives_equal(way):
    e, table = edge(("0", "2"), ("1",), Rows.BALANCED), make_rows(40)
    parts = scatter(table, e.sources)
    chunked = {
        s: pa.concat_tables([part.slice(i, 3) for i in range(0, len(part), 3)])
        for s, part in parts.items()
    }
    got, _, _ = asyncio.run(move(e, chunked, way))
    assert got["1"].equals(table)


@pytest.mark.parametrize("way", list(WAYS))
def test_fixed_size_lists_with_nulls_on_one_source_arrive_equal(way):
    e, table = edge(("0", "2"), ("1",), Rows.BALANCED), make_rows(8)
    pairs = [[i, i] if i % 3 or i < 4 else None for i in range(8)]
    table = table.set_column(
        table.column_names.index("pair"), "pair", pa.array(pairs, SCHEMA.field("pair").type)
    )
    got, _, _ = asyncio.run(move(e, {"0": table.slice(0, 4), "2": table.slice(4)}, way))
    assert got["1"].equals(table)


def test_a_column_type_that_cannot_move_is_refused_at_once():
    schema = SCHEMA.append(pa.field("label", pa.dictionary(pa.int32(), pa.string())))
    with pytest.raises(DataError, match="label"):
        buffers_of([edge(("0",), ("1",), Rows.BALANCED, schema=schema)])


def test_memory_beyond_the_limit_is_given_back_after_a_turn():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def pull():
        buffers, _ = buffers_of([e], "shared memory")
        await buffers["0"].publish(e, ITERATION, make_rows(50))
        got = await buffers["1"].pull(e, e, ITERATION)
        held = buffers["1"].arena.held
        del got
        buffers["1"].forget(1)
        return held, buffers["1"].arena.held

    held, after = asyncio.run(pull())
    assert held > SMALL.memory
    assert after <= SMALL.memory // 2


def test_parts_of_a_table_are_published_pulled_and_freed_one_by_one():
    e, rows = edge(names(2), names(2, first=1), Rows.REPLICATED), make_rows(40)
    parts = [rows.slice(first, 10) for first in range(0, 40, 10)]

    async def work():
        buffers, _ = buffers_of([e], way="shared memory")
        for number, part in enumerate(parts):
            pulls = [
                asyncio.create_task(buffers[w].pull(e, e, ITERATION, number)) for w in e.targets
            ]
            shares = scatter(part, e.sources, seed=number)
            for worker in e.sources:
                await buffers[worker].publish(e, ITERATION, shares[worker], number)
            assert [table.sort_by("row_id") for table in await asyncio.gather(*pulls)] == [
                part,
                part,
            ]
            await asyncio.gather(
                *(buffers[worker].wait_until_acked(e, ITERATION, number) for worker in e.sources)
            )
            assert [buffers[worker].unacked_bytes for worker in e.sources] == [0, 0]

    asyncio.run(work())


def test_waiting_for_acks_of_a_part_ends_by_abort():
    e, rows = edge(names(1), names(2, first=1), Rows.REPLICATED), make_rows(10)

    async def work():
        buffers, _ = buffers_of([e])
        await buffers["0"].publish(e, ITERATION, rows, 0)
        waiting = asyncio.create_task(buffers["0"].wait_until_acked(e, ITERATION, 0))
        await asyncio.sleep(0)
        buffers["0"].abort("worker '2' died")
        with pytest.raises(Aborted, match="worker '2' died"):
            await asyncio.wait_for(waiting, 20)

    asyncio.run(work())


def test_no_ack_is_sent_after_an_abort():
    e = edge(("0",), ("1",), Rows.BALANCED)

    async def work():
        buffers, _ = buffers_of([e])
        await buffers["0"].publish(e, ITERATION, make_rows(10))
        await buffers["1"].pull(e, e, ITERATION)
        buffers["1"].abort("stopped")
        await buffers["1"].wait_for_acks()
        assert buffers["0"].unacked_bytes > 0

    asyncio.run(work())
