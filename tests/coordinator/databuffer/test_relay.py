"""Replicated rows cross the link to a host once, however many of its workers want them."""

import asyncio
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.layout.host_routes import count_takers, routes_to
from siirl_dask.coordinator.transport.messages import Op, Request, TransitionKey, pack_ints
from siirl_dask.errors import PeerError
from siirl_dask.planner import Rows
from siirl_dask.planner.hosts import by_host
from tests.coordinator.rows import (
    ITERATION,
    SCHEMA,
    buffers_of,
    edge,
    make_rows,
    names,
    scatter,
    wait_for_acks,
)

HOSTS = {**dict.fromkeys("0123", "a"), **dict.fromkeys("4567", "b"), "8": "c"}


def crossed(buffers, hosts):
    """Return the bytes of rows that went from host to host."""
    bytes_between = Counter()
    for worker, buffer in buffers.items():
        for source, nbytes in buffer.traffic.by_worker.items():
            if hosts[source] != hosts[worker]:
                bytes_between[hosts[source], hosts[worker]] += nbytes
    return bytes_between


async def moved(e, parts, hosts, way, *, part=None, **options):
    """Publish ``parts`` while all targets pull; return what each got, and the databuffers."""
    buffers, _ = buffers_of([e], way, hosts=hosts, **options)
    pulls = [
        asyncio.create_task(buffers[target].pull(e, e, ITERATION, part)) for target in e.targets
    ]
    await asyncio.sleep(0)
    for source in e.sources:
        await buffers[source].publish(e, ITERATION, parts[source], part)
    pulled = await asyncio.gather(*pulls)
    await wait_for_acks(buffers)
    return pulled, buffers


@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(0, 5),
    st.dictionaries(st.sampled_from(names(11)), st.sampled_from("abc")),
    st.integers(0, 25), st.sampled_from(["large messages", "messages", "shared memory", "shared tables"]),
    st.sampled_from([None, 0]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_replicated_rows_reach_every_target_on_any_hosts(s, t, shift, hosts, count, way, part):
    e, table = edge(names(s), names(t, shift), Rows.REPLICATED), make_rows(count)

    async def go():
        pulled, buffers = await moved(e, scatter(table, e.sources), hosts, way, part=part)
        for got in pulled:
            got.validate(full=True)
            assert got.equals(table)
        del got, pulled
        # what is dropped is acked on the loop, by the relays after those that they wait for
        for _ in range(10):
            await asyncio.sleep(0)
            await wait_for_acks(buffers)
        assert not any(buffer.unacked_bytes for buffer in buffers.values())

    asyncio.run(go())


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 9),
    st.dictionaries(st.sampled_from(names(19)), st.sampled_from("abcd")),
)  # fmt: skip
def test_a_sources_rows_cross_each_link_once_per_host(s, t, shift, hosts):
    e = edge(names(s), names(t, shift), Rows.REPLICATED)
    for number, source in enumerate(e.sources):
        takers = Counter()
        for host, targets in by_host(e.targets, hosts).items():
            routes = routes_to(targets[0], e, hosts)
            assert all(routes_to(target, e, hosts) == routes for target in targets), (
                "all compute the same"
            )
            takers[host] = 1 if number in routes.relays else len(targets)
            assert takers[host] == 1 or host == hosts.get(source, ""), (
                "only on its own host several ask the source"
            )
        assert takers.total() == count_takers(source, e, hosts)


@pytest.mark.parametrize("way", ["large messages", "shared tables"])
def test_no_byte_crosses_a_link_twice(way):
    e, table = edge(names(3), names(9), Rows.REPLICATED), make_rows(400)
    pulled, buffers = asyncio.run(moved(e, scatter(table, e.sources), HOSTS, way))
    assert all(got.equals(table) for got in pulled)
    bytes_between = crossed(buffers, HOSTS)
    assert set(bytes_between) == {("a", "b"), ("a", "c")}
    assert bytes_between["a", "b"] == pytest.approx(bytes_between["a", "c"], rel=0.01)
    takers = [
        w for w in "4567" if any(HOSTS[source] == "a" for source in buffers[w].traffic.by_worker)
    ]
    assert takers == ["4", "5", "6"], "each of the three sources' rows are taken by another worker"


def test_a_part_is_acked_to_its_source_only_when_every_worker_of_a_host_has_it():
    e, table = edge(("0",), ("4", "5"), Rows.REPLICATED), make_rows(20)

    async def go():
        buffers, _ = buffers_of([e], "messages", hosts=HOSTS)
        await buffers["0"].publish(e, ITERATION, table, 0)
        assert (await buffers["4"].pull(e, e, ITERATION, 0)).equals(table)  # the relay
        await wait_for_acks(buffers)
        assert buffers["0"].unacked_bytes > 0
        assert (await buffers["5"].pull(e, e, ITERATION, 0)).equals(table)
        async with asyncio.timeout(10):
            await wait_for_acks(buffers)
            await buffers["0"].wait_until_acked(e, ITERATION, 0)
        assert [buffer.unacked_bytes for buffer in buffers.values()] == [0, 0, 0]

    asyncio.run(go())


def test_a_failure_of_the_link_reaches_those_who_wait_for_a_relay():
    e, table = edge(("0",), ("4", "5"), Rows.REPLICATED), make_rows(20)

    async def go():
        buffers, transport = buffers_of([e], "messages", hosts=HOSTS)
        handle = transport.handlers["0"]

        async def refuse_rows(request):
            if request.op == Op.FETCH:
                raise PeerError("the link is down")
            return await handle(request)

        transport.handlers["0"] = refuse_rows
        await buffers["0"].publish(e, ITERATION, table)
        pulls = [buffers[target].pull(e, e, ITERATION) for target in e.targets]
        return await asyncio.gather(*pulls, return_exceptions=True)

    for error in asyncio.run(go()):
        assert isinstance(error, PeerError)
        assert "the link is down" in str(error)


@pytest.mark.parametrize("op", [Op.SUBTREE_STATISTICS, Op.ALL_STATISTICS])
def test_a_relay_has_rows_and_no_statistics(op):
    e, table = edge(("0",), ("4", "5"), Rows.REPLICATED), make_rows(20)

    async def go():
        _, buffers = await moved(e, {"0": table}, HOSTS, "messages")
        key = TransitionKey("run", ITERATION.sequence, f"train/{e.name}@0")
        await buffers["4"].handle(Request(op, key, {"rows": pack_ints(np.arange(3))}))

    with pytest.raises(PeerError):
        asyncio.run(go())


def test_rows_with_one_owner_go_to_it_directly():
    e, table = edge(names(4), names(5, 4), Rows.BALANCED), make_rows(40)
    pulled, buffers = asyncio.run(moved(e, scatter(table, e.sources), HOSTS, "messages"))
    assert pa.concat_tables(pulled).sort_by("row_id").equals(table)
    assert all(set(buffer.traffic.by_worker) <= set(e.sources) for buffer in buffers.values())
    assert pulled[0].schema.equals(SCHEMA)
