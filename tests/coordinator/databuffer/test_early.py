"""Rows that travel before their table is whole change what is still to be fetched, and nothing
else.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.transport.messages import Op, Reply, Request, pack_ints
from siirl_dask.errors import Aborted, NodeError, PeerError
from siirl_dask.planner import EarlyColumns, Iteration, Rows
from tests.coordinator.rows import (
    ITERATION,
    buffers_of,
    edge,
    make_rows,
    names,
    scatter,
    wait_for_acks,
)

COLUMNS = ("ids", "logprobs", "text", "maybe")
TINY = BufferLimits(early_message=10)
ALONE = edge(("0",), ("1",), Rows.BALANCED)


def early_edge(e):
    return replace(e, early=EarlyColumns("node", COLUMNS))


def used(buffers):
    return [buffer._early.allowance.used for buffer in buffers.values()]


def watch_memory(buffers):
    """Fail as soon as a worker keeps more bytes of early rows than it may."""
    for buffer in buffers.values():
        allowance = buffer._early.allowance
        give, take = allowance.give, allowance.take

        def checked_take(size, take=take, allowance=allowance):
            granted = take(size)
            assert 0 <= allowance.used <= allowance.limit
            return granted

        def checked_give(size, give=give, allowance=allowance):
            give(size)
            assert 0 <= allowance.used <= allowance.limit

        allowance.take, allowance.give = checked_take, checked_give


async def generated(
    e, parts, *, prefetch=True, limits=TINY, way="messages", seed=0, before=None, hosts=None
):
    """Have each source hand over rows in random order and at random times, and publish them;
    return what came.
    """
    rng = np.random.default_rng(seed)
    buffers, transport = buffers_of([e], way, limits=limits, prefetch=prefetch, hosts=hosts)
    watch_memory(buffers)
    if before is not None:
        before(buffers, transport)
    for target in e.targets:
        buffers[target].prefetch([e], ITERATION)
    pulls = [asyncio.create_task(buffers[target].pull(e, e, ITERATION)) for target in e.targets]
    for at in rng.permutation(len(e.sources)):
        source = e.sources[at]
        table = parts[source]
        for row in rng.permutation(table.num_rows)[
            : int(rng.integers(0, table.num_rows + 1))
        ].tolist():
            if buffers[source].leaves_early(e):
                columns = ["row_id", "group_id", *COLUMNS]
                buffers[source].hand_over(e, ITERATION, table.slice(row, 1).select(columns))
            for _ in range(int(rng.integers(0, 4))):
                await asyncio.sleep(0)
        await buffers[source].publish(e, ITERATION, table)
    pulled = await asyncio.gather(*pulls)
    await wait_for_acks(buffers)
    return pulled, buffers, transport


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 5), st.integers(1, 5),
    st.sampled_from([rows for rows in Rows if rows is not Rows.REPLICATED]), st.booleans(),
    st.integers(0, 40), st.integers(0, 9), st.sampled_from(["messages", "shared memory"]),
    st.sampled_from([1, 60, 500]), st.sampled_from([2**9, 2**12, 2**20]),
)  # fmt: skip
def test_tables_are_the_same_with_and_without_prefetch(
    s, t, rows, by_minibatch, count, seed, way, message, memory
):
    e = early_edge(
        edge(names(s), names(t, 10), rows, by_minibatch=by_minibatch and rows is Rows.BALANCED)
    )
    parts = scatter(make_rows(count, seed), e.sources, seed)
    limits = BufferLimits(early_message=message, memory=memory, message=200)

    async def both():
        expected, _, _ = await generated(e, parts, prefetch=False, limits=limits, way=way)
        got, buffers, _ = await generated(e, parts, limits=limits, way=way, seed=seed)
        for table in got:
            table.validate(full=True)
        assert got == expected
        assert used(buffers) == [0] * len(buffers)
        assert [buffer.unacked_bytes for buffer in buffers.values()] == [0] * len(buffers)
        del got, expected, table
        assert [buffer.arena.in_use for buffer in buffers.values()] == [0] * len(buffers)

    asyncio.run(both())


def heavy(table):
    """Bytes in the columns that travel early."""
    return sum(table[name].combine_chunks().values.nbytes for name in ("ids", "logprobs"))


def hand_over_all(buffer, e, table):
    buffer.hand_over(e, ITERATION, table.select(["row_id", "group_id", *e.early.columns]))


async def all_early(e, parts, limits=TINY, **options):
    """Hand everything over and let it travel, then publish; return what came and the
    databuffers.
    """
    buffers, _ = buffers_of([e], "large messages", limits=limits, prefetch=True, **options)
    for target in e.targets:
        buffers[target].prefetch([e], ITERATION)
    for source in e.sources:
        for at in range(parts[source].num_rows if e.early else 0):
            hand_over_all(buffers[source], e, parts[source].slice(at, 1))
            for _ in range(20):
                await asyncio.sleep(0)
    for source in e.sources:
        await buffers[source].publish(e, ITERATION, parts[source])
    return await asyncio.gather(
        *(buffers[target].pull(e, e, ITERATION) for target in e.targets)
    ), buffers


def test_rows_that_came_early_are_not_fetched_again():
    e = replace(ALONE, early=EarlyColumns("node", ("ids", "logprobs")))
    table = make_rows(40)
    (got,), buffers = asyncio.run(all_early(e, {"0": table}))
    assert got.equals(table)
    assert buffers["1"].traffic.early > 0.9 * heavy(table)  # the last rows are not worth a message
    _, moved = asyncio.run(all_early(replace(e, early=None), {"0": table}))
    assert buffers["1"].traffic.total == moved["1"].traffic.total


def test_few_bytes_that_came_early_are_fetched_again_where_lengths_vary():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3, 1, 400), 400).astype(int)
    table = make_rows(400).drop(["ids", "logprobs", "tokens", "minibatch"])
    table = table.append_column("ids", pa.array([[1] * n for n in lengths], pa.list_(pa.int32())))
    table = table.append_column("tokens", pa.array(lengths, pa.int64()))
    e = edge(names(2), names(3, 10), Rows.BALANCED, schema=table.schema)
    got, buffers = asyncio.run(
        all_early(
            replace(e, early=EarlyColumns("node", ("ids",))),
            scatter(table, e.sources),
            BufferLimits(early_message=200),
        )
    )
    assert pa.concat_tables(got).num_rows == table.num_rows
    early = sum(buffers[target].traffic.early for target in e.targets)
    assert early > 0.9 * 4 * lengths.sum()


def test_rows_within_a_host_travel_early_only_if_asked_for():
    e = early_edge(edge(names(2), names(2, 2), Rows.BALANCED))
    apart, together = {"0": "a", "1": "a", "2": "b", "3": "b"}, None
    for hosts, prefetch, expected in (
        (apart, None, True), (together, None, False), (together, True, True), (apart, False, False),
    ):  # fmt: skip
        buffers, _ = buffers_of([e], prefetch=prefetch, hosts=hosts)
        assert buffers["0"].leaves_early(e) is expected


@pytest.mark.parametrize("wrong", ["ids", "text"])
def test_a_row_that_changes_after_it_was_handed_over_ends_the_run(wrong):
    e, table = early_edge(ALONE), make_rows(12)
    at = table.column_names.index(wrong)
    other = table.set_column(
        at, table.field(wrong), table[wrong].combine_chunks().take(np.arange(12)[::-1])
    )

    async def go():
        buffers, _ = buffers_of([e], limits=TINY, prefetch=True)
        hand_over_all(buffers["0"], e, other.filter(pa.array([0 < row < 4 for row in range(12)])))
        await buffers["0"].publish(e, ITERATION, table)

    with pytest.raises(NodeError, match=r"node 'node' handed over row \d early and gave another"):
        asyncio.run(go())


def refusing(op):
    """Have every source refuse requests of one kind."""

    def refuse(_, transport):
        for worker, handle in list(transport.handlers.items()):

            async def handler(request, handle=handle):
                if request.op == op:
                    raise PeerError("refused")
                return await handle(request)

            transport.handlers[worker] = handler

    return refuse


def answering(reply):
    def answer(_, transport):
        for worker, handle in list(transport.handlers.items()):

            async def handler(request, handle=handle):
                return reply if request.op == Op.EARLY else await handle(request)

            transport.handlers[worker] = handler

    return answer


ROW = pack_ints(np.array([3]))
MALFORMED = {
    "no numbers": Reply({"rows": "three"}),
    "no lengths": Reply({"rows": ROW}, [b""] * 4),
    "too few columns": Reply({"rows": ROW, "lengths": [ROW]}, [b"123"]),
    "other sizes": Reply({"rows": ROW, "lengths": [ROW] * 4}, [b"1"] * 4),
    "a row twice": Reply(
        {"rows": ROW * 2, "lengths": [pack_ints(np.array([0, 0]))] * 4}, [b""] * 4
    ),
    "too much": Reply(
        {"rows": ROW, "lengths": [pack_ints(np.array([2**21]))] * 4}, [bytes(2**23)] * 4
    ),
    "negative": Reply({"rows": ROW, "lengths": [pack_ints(np.array([-1]))] * 4}, [b""] * 4),
}


@pytest.mark.parametrize(
    "before", [refusing(Op.EARLY), *map(answering, MALFORMED.values())], ids=["no", *MALFORMED]
)
def test_a_prefetch_that_fails_changes_nothing(before):
    e, table = early_edge(ALONE), make_rows(20)
    (got,), buffers, _ = asyncio.run(generated(e, {"0": table}, before=before))
    assert got.equals(table)
    assert used(buffers) == [0, 0]


def test_early_rows_of_other_lengths_than_told_later_name_the_worker():
    e, table = early_edge(ALONE), make_rows(20)
    lengths = pack_ints(np.array([10**4]))
    reply = Reply(
        {"rows": ROW, "lengths": [lengths] * 4}, [bytes(10**4 * width) for width in (4, 8, 1, 2)]
    )
    given_once = iter([reply])

    def before(_, transport):
        handle = transport.handlers["0"]

        async def handler(request):
            return (
                next(given_once, Reply({"rows": b""}))
                if request.op == Op.EARLY
                else await handle(request)
            )

        transport.handlers["0"] = handler

    values = table["ids"].combine_chunks()
    short = pa.ListArray.from_arrays(values.offsets, values.values.cast(pa.int16()))
    without_nulls = table.set_column(table.column_names.index("maybe"), table.field("maybe"), short)
    with pytest.raises(
        PeerError, match="worker '0' sent rows of column 'ids' early with other lengths"
    ):
        asyncio.run(
            generated(
                e, {"0": without_nulls}, before=before, limits=BufferLimits(early_message=2**20)
            )
        )


def test_a_question_that_is_asked_twice_is_answered_twice():
    e, table = early_edge(ALONE), make_rows(20).drop(["maybe"])
    e = replace(e, early=EarlyColumns("node", ("ids",)))

    async def go():
        buffers, _ = buffers_of([e], limits=TINY, prefetch=True)
        key = buffers["0"].key(e, ITERATION)
        long = np.flatnonzero(table["tokens"].to_numpy() > 3).tolist()

        def hand_over(at):
            buffers["0"].hand_over(
                e, ITERATION, table.slice(at, 1).select(["row_id", "group_id", "ids"])
            )

        def ask(number):
            return buffers["0"].handle(
                Request(Op.EARLY, key, {"target": 0, "number": number, "limit": 2**20})
            )

        hand_over(long[0])
        first = await ask(0)
        hand_over(long[1])
        assert (await ask(0)) == first
        second = await ask(1)
        assert second != first
        with pytest.raises(PeerError, match="asked for message 0 of early rows"):
            await ask(0)

    asyncio.run(go())


@pytest.mark.parametrize(
    "body", [{}, {"target": 1}, {"target": 0, "number": 0, "limit": 0}, {"target": "0"}]
)
def test_questions_that_no_target_asks_are_refused(body):
    e = early_edge(ALONE)

    async def go():
        buffers, _ = buffers_of([e], limits=TINY, prefetch=True)
        await buffers["0"].handle(Request(Op.EARLY, buffers["0"].key(e, ITERATION), body))

    with pytest.raises(PeerError, match="early rows"):
        asyncio.run(go())


@pytest.mark.parametrize("end", ["abort", "forget", "close"])
def test_whatever_ends_an_iteration_frees_its_early_rows(end):
    e, table = early_edge(ALONE), make_rows(20)

    async def go():
        buffers, _ = buffers_of([e], limits=TINY, prefetch=True)
        buffers["1"].prefetch([e], ITERATION)
        for at in range(10):
            hand_over_all(buffers["0"], e, table.slice(at, 1))
            await asyncio.sleep(0)
        assert sum(used(buffers)) > 0
        for buffer in buffers.values():
            {
                "abort": lambda b=buffer: b.abort("over"),
                "forget": lambda b=buffer: b.forget(1),
                "close": buffer.close,
            }[end]()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert used(buffers) == [0, 0]
        later = Iteration("train", 9, 9)
        if end == "abort":  # and nothing is kept afterwards
            buffers["1"].prefetch([e], later)
            with pytest.raises(Aborted):
                await buffers["1"].pull(e, e, later)
            assert used(buffers) == [0, 0]

    asyncio.run(go())
