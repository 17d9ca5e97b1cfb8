"""Rows that several targets of a host read where the source has put them."""

import asyncio
import gc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.arena import Arena, Attachments, Handle
from siirl_dask.coordinator.description import unpack_descriptions
from siirl_dask.coordinator.lending import lend, unpack_loan
from siirl_dask.coordinator.limits import Limits
from siirl_dask.coordinator.messages import Turn
from siirl_dask.errors import PeerError
from siirl_dask.planner import Rows
from tests.coordinator.test_databuffer import SCHEMA, TURN, buffers_of, edge, make_rows, scatter

EDGE = edge(("0",), ("0", "1", "2"), Rows.REPLICATED)
NEXT = Turn("train", 2, 1)


async def until(condition):
    """What peers say has arrived, however long it takes them."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def hand_out(buffers, turn, table, part=None):
    await buffers["0"].publish(EDGE, turn, table, part)
    return [await buffers[target].pull(EDGE, EDGE, turn, part) for target in EDGE.targets]


def test_all_targets_share_one_copy_and_only_lengths_are_sent():
    ids = pa.array([list(range(10_000))] * 50, SCHEMA.field("ids").type)
    table = make_rows(50).set_column(SCHEMA.get_field_index("ids"), SCHEMA.field("ids"), ids)

    async def work():
        buffers, transport = buffers_of([EDGE], "lent")
        assert await hand_out(buffers, TURN, table) == [table] * 3
        assert [buffers[target].arena.held for target in ("1", "2")] == [0, 0]
        assert transport.payload < 10_000 < ids.nbytes

    asyncio.run(work())


def test_memory_is_used_again_only_when_every_target_has_let_go_of_it():
    first, second = make_rows(30, seed=1), make_rows(30, seed=2)

    async def work():
        buffers, _ = buffers_of([EDGE], "lent")
        held = await hand_out(buffers, TURN, first)
        buffers["0"].forget(NEXT.sequence)
        assert await hand_out(buffers, NEXT, second) == [second] * 3
        assert held == [first] * 3
        assert buffers["0"].waiting > 0
        held[1] = None
        gc.collect()
        await buffers["1"].settle()
        assert held[2] == first
        column = held[2]["ids"].slice(7, 1)
        held.clear()
        gc.collect()
        assert column.to_pylist() == first["ids"].slice(7, 1).to_pylist()
        assert buffers["0"].waiting > 0
        del column
        gc.collect()
        await until(lambda: buffers["0"].waiting == 0)
        buffers["0"].forget(NEXT.sequence + 1)
        assert buffers["0"].arena.in_use == 0

    asyncio.run(work())


def test_who_publishes_a_part_waits_until_nobody_reads_it_any_more():
    table = make_rows(30)

    async def work():
        buffers, _ = buffers_of([EDGE], "lent")
        held = await hand_out(buffers, TURN, table, part=0)
        waiting = asyncio.create_task(buffers["0"].until_taken(EDGE, TURN, 0))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        held.clear()
        gc.collect()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(work())


def test_tables_outlive_the_source():
    table = make_rows(30)

    async def work():
        buffers, _ = buffers_of([EDGE], "lent")
        got = await hand_out(buffers, TURN, table)
        buffers.pop("0").close()
        return got[1:]

    got = asyncio.run(work())
    gc.collect()
    assert got == [table] * 2


def test_borrowed_memory_cannot_be_written():
    _, loan = lend(make_rows(5), Arena(keep=0), least=0)
    assert not Attachments(writable=False).attach(loan.handle).flags.writeable


@pytest.mark.parametrize(("way", "lend_from"), [("large messages", 0), ("shared memory", 2**10)])
def test_short_rows_and_rows_that_go_as_messages_are_not_lent(way, lend_from):
    async def work():
        buffers, _ = buffers_of([EDGE], way, limits=Limits(lend_from=lend_from))
        await buffers["0"].publish(EDGE, TURN, make_rows(20))
        assert buffers["0"].arena.held == 0

    asyncio.run(work())


def test_a_table_in_many_chunks_is_lent_as_one():
    table = pa.concat_tables(make_rows(20).slice(i, 1) for i in range(20))
    lent, loan = lend(table, Arena(keep=0), least=0)
    assert lent.equals(table)
    assert [lent[name].num_chunks for name in loan.columns] == [1] * 4
    lent.validate(full=True)


def test_sources_that_lend_and_sources_that_do_not_meet_in_one_table():
    e, table = edge(("0", "1"), ("2", "3"), Rows.REPLICATED), make_rows(40)
    parts = scatter(table, e.sources)

    async def work():
        buffers, _ = buffers_of([e], "lent")
        buffers["1"]._limits = replace(buffers["1"]._limits, lend_from=2**20)
        for source in e.sources:
            await buffers[source].publish(e, TURN, parts[source])
        assert [await buffers[target].pull(e, e, TURN) for target in e.targets] == [table, table]
        assert buffers["0"].arena.in_use > 0

    asyncio.run(work())


places = st.integers(-(2**40), 2**63) | st.integers(0, 2**16) | st.none() | st.text(max_size=2)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(("ids", "logprobs", "text", "image"), places)),
    places, places, st.integers(0, 2**48),
)  # fmt: skip
def test_a_loan_that_cannot_be_is_refused_and_one_that_can_gives_a_valid_table(columns, plain, plain_size, longest):
    table = make_rows(10)

    async def work():
        buffers, transport = buffers_of([EDGE], "lent")
        handle = transport.handlers["0"]

        async def lie(request):
            reply = await handle(request)
            if reply.header.get("about"):
                about = list(reply.header["about"][0])
                about[-1] = [about[-1][0], columns, plain, plain_size]
                reply = replace(reply, header={"about": [about]})
            return reply

        transport.handlers["0"] = lie
        await buffers["0"].publish(EDGE, TURN, table)
        (got,) = await asyncio.gather(buffers["1"].pull(EDGE, EDGE, TURN), return_exceptions=True)
        if not isinstance(got, PeerError):
            got.validate(full=True)
            assert got.schema.equals(SCHEMA)

    asyncio.run(work())


@pytest.mark.parametrize(
    "loan", [0, [], [[1, 2, 8192, b"0" * 16], {}, 0], [[1, 2, 8192, b"0" * 16], {"ids": -1}, 0, 0], [[1], {}, 0, 0]]
)
def test_what_is_no_loan_is_refused(loan):
    with pytest.raises(PeerError, match="received"):
        unpack_loan(loan)


def test_a_loan_travels_with_the_description_of_its_rows():
    async def work():
        buffers, _ = buffers_of([EDGE], "lent")
        await buffers["0"].publish(EDGE, TURN, make_rows(5))
        return await buffers["0"]._gather_own(buffers["0"].key(EDGE, TURN))

    (described,) = asyncio.run(work()).descriptions.values()
    header, frames = described.pack()
    found = unpack_descriptions([header], frames, 1, SCHEMA)[0]
    assert found.loan == described.loan
    assert isinstance(found.loan.handle, Handle)
    assert np.array_equal(found.patterns, described.patterns)
