"""Several targets of a host read a shared table where its source has put it."""

import asyncio
import contextlib
import gc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.arena import Arena, Attachments, Handle
from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.row_lengths import unpack_row_lengths, unpack_shared_table
from siirl_dask.coordinator.databuffer.shared_tables import pack_others, share, unpack_others
from siirl_dask.coordinator.layout.assignment import row_statistics
from siirl_dask.errors import PeerError
from siirl_dask.planner import Iteration, Rows
from tests.coordinator.rows import (
    ITERATION,
    SCHEMA,
    SHARED_TABLES,
    buffers_of,
    edge,
    make_rows,
    scatter,
)

EDGE = edge(("0",), ("0", "1", "2"), Rows.REPLICATED)
NEXT = Iteration("train", 2, 1)


async def until(condition):
    """Wait for a condition that peers' acks bring about, however long they take."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def publish_and_pull(buffers, iteration, table, part=None):
    await buffers["0"].publish(EDGE, iteration, table, part)
    return [await buffers[target].pull(EDGE, EDGE, iteration, part) for target in EDGE.targets]


def test_all_targets_read_one_copy_and_only_lengths_are_sent():
    ids = pa.array([list(range(10_000))] * 50, SCHEMA.field("ids").type)
    table = make_rows(50).set_column(SCHEMA.get_field_index("ids"), SCHEMA.field("ids"), ids)

    async def work():
        buffers, transport = buffers_of([EDGE], "shared tables")
        assert await publish_and_pull(buffers, ITERATION, table) == [table] * 3
        assert [buffers[target].arena.held for target in ("1", "2")] == [0, 0]
        assert transport.payload < 10_000 < ids.nbytes

    asyncio.run(work())


def test_memory_is_reused_only_when_every_target_has_dropped_it():
    first, second = make_rows(30, seed=1), make_rows(30, seed=2)

    async def work():
        buffers, _ = buffers_of([EDGE], "shared tables")
        held = await publish_and_pull(buffers, ITERATION, first)
        buffers["0"].forget(NEXT.sequence)
        assert await publish_and_pull(buffers, NEXT, second) == [second] * 3
        assert held == [first] * 3
        assert buffers["0"].unacked_bytes > 0
        held[1] = None
        gc.collect()
        await buffers["1"].wait_for_acks()
        assert held[2] == first
        column = held[2]["ids"].slice(7, 1)
        held.clear()
        gc.collect()
        assert column.to_pylist() == first["ids"].slice(7, 1).to_pylist()
        assert buffers["0"].unacked_bytes > 0
        del column
        gc.collect()
        await until(lambda: buffers["0"].unacked_bytes == 0)
        buffers["0"].forget(NEXT.sequence + 1)
        assert buffers["0"].arena.in_use == 0

    asyncio.run(work())


def test_shared_rows_that_no_target_asked_for_are_freed_with_their_iteration():
    """As weights are that no engine takes: those of the steps before a checkpoint, with
    rollout.max_staleness.
    """

    async def work():
        buffers, _ = buffers_of([EDGE], "shared tables")
        await buffers["0"].publish(EDGE, ITERATION, make_rows(30, seed=1))
        assert buffers["0"].arena.in_use > 0
        buffers["0"].forget(ITERATION.sequence)
        assert (
            await publish_and_pull(buffers, NEXT, make_rows(30, seed=2))
            == [make_rows(30, seed=2)] * 3
        )
        buffers["0"].forget(NEXT.sequence + 1)
        gc.collect()
        await until(lambda: buffers["0"].unacked_bytes == 0)
        buffers["0"].forget(NEXT.sequence + 1)
        assert buffers["0"].arena.in_use == 0

    asyncio.run(work())


def test_a_part_is_acked_only_when_nobody_reads_it_any_more():
    table = make_rows(30)

    async def work():
        buffers, _ = buffers_of([EDGE], "shared tables")
        held = await publish_and_pull(buffers, ITERATION, table, part=0)
        waiting = asyncio.create_task(buffers["0"].wait_until_acked(EDGE, ITERATION, 0))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        held.clear()
        gc.collect()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(work())


def test_tables_outlive_the_source():
    table = make_rows(30)

    async def work():
        buffers, _ = buffers_of([EDGE], "shared tables")
        got = await publish_and_pull(buffers, ITERATION, table)
        buffers.pop("0").close()
        return got[1:]

    got = asyncio.run(work())
    gc.collect()
    assert got == [table] * 2


def test_shared_memory_cannot_be_written_by_its_readers():
    _, shared = share(make_rows(5), Arena(keep=0), min_row_bytes=0)
    assert not Attachments(writable=False).attach(shared.handle).flags.writeable


@pytest.mark.parametrize(("way", "share_from"), [("large messages", 0), ("shared memory", 2**10)])
def test_short_rows_and_rows_sent_as_messages_are_not_shared(way, share_from):
    async def work():
        buffers, _ = buffers_of([EDGE], way, limits=BufferLimits(share_from=share_from))
        await buffers["0"].publish(EDGE, ITERATION, make_rows(20))
        assert buffers["0"].arena.held == 0

    asyncio.run(work())


def test_other_columns_of_a_peer_that_are_compressed_are_refused_and_not_unpacked():
    """An Arrow stream of 200 kB may unpack to gigabytes."""
    schema = pa.schema({"minibatch": pa.int64()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(pa.table({"minibatch": np.zeros(2**24, np.int64)}))
    before = pa.total_allocated_bytes()
    with pytest.raises(PeerError, match="no table of"):
        unpack_others(sink.getvalue().to_pybytes(), schema)
    assert pa.total_allocated_bytes() - before < 2**20


@given(st.binary(max_size=64), st.integers(0, 200), st.integers(1, 9))
def test_other_columns_that_are_damaged_are_refused_or_valid(noise, place, rows):
    table = make_rows(rows).select(["minibatch", "pair", "messages", "maybe"])
    packed = pack_others(table)
    assert unpack_others(packed, table.schema).equals(table)
    with contextlib.suppress(PeerError):
        unpack_others(packed[:place] + noise + packed[place + len(noise) :], table.schema).validate(
            full=True
        )


def test_a_table_in_many_chunks_is_shared_as_one():
    table = pa.concat_tables(make_rows(20).slice(i, 1) for i in range(20))
    over_shared_memory, shared = share(table, Arena(keep=0), min_row_bytes=0)
    assert over_shared_memory.equals(table)
    assert [over_shared_memory[name].num_chunks for name in shared.starts] == [1] * 4
    over_shared_memory.validate(full=True)


def test_shared_and_fetched_rows_meet_in_one_table():
    e, table = edge(("0", "1"), ("2", "3"), Rows.REPLICATED), make_rows(40)
    parts = scatter(table, e.sources)

    async def work():
        long_rows_only = {"limits": replace(SHARED_TABLES["limits"], share_from=2**20)}
        buffers, _ = buffers_of([e], "shared tables", of_worker={"1": long_rows_only})
        for source in e.sources:
            await buffers[source].publish(e, ITERATION, parts[source])
        assert [await buffers[target].pull(e, e, ITERATION) for target in e.targets] == [
            table,
            table,
        ]
        assert buffers["0"].arena.in_use > 0

    asyncio.run(work())


places = st.integers(-(2**40), 2**63) | st.integers(0, 2**16) | st.none() | st.text(max_size=2)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(("ids", "logprobs", "text", "image"), places)),
    places,
    places,
)
def test_a_false_shared_table_is_refused_or_gives_a_valid_table(starts, others_start, others_size):
    table = make_rows(10)

    async def work():
        buffers, transport = buffers_of([EDGE], "shared tables")
        handle = transport.handlers["0"]

        async def lie(request):
            reply = await handle(request)
            if reply.header.get("row_lengths"):
                header = list(reply.header["row_lengths"][0])
                header[-1] = [header[-1][0], starts, others_start, others_size]
                reply = replace(reply, header={"row_lengths": [header]})
            return reply

        transport.handlers["0"] = lie
        await buffers["0"].publish(EDGE, ITERATION, table)
        (got,) = await asyncio.gather(
            buffers["1"].pull(EDGE, EDGE, ITERATION), return_exceptions=True
        )
        if not isinstance(got, PeerError):
            got.validate(full=True)
            assert got.schema.equals(SCHEMA)

    asyncio.run(work())


@pytest.mark.parametrize(
    "value",
    [
        0,
        [],
        [[1, 2, 8192, b"0" * 16], {}, 0],
        [[1, 2, 8192, b"0" * 16], {"ids": -1}, 0, 0],
        [[1], {}, 0, 0],
    ],
)
def test_values_that_are_no_shared_table_are_refused(value):
    with pytest.raises(PeerError, match="received"):
        unpack_shared_table(value)


def test_a_shared_table_travels_with_the_lengths_of_its_rows():
    table = make_rows(5)
    published = Published(row_statistics(table, 0), table, unacked=5)
    published.share(Arena(keep=0), 0)
    row_lengths = published.row_lengths(0, 2**20)
    header, frames = row_lengths.pack()
    received = unpack_row_lengths([header], frames, 1, SCHEMA)[0]
    assert received.shared_table == row_lengths.shared_table
    assert isinstance(received.shared_table.handle, Handle)
    assert np.array_equal(received.group_lengths, row_lengths.group_lengths)
