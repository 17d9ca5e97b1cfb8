import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.limits import Budget, Traffic
from siirl_dask.coordinator.transport.messages import Op
from siirl_dask.planner import Rows
from tests.coordinator.rows import ITERATION, buffers_of, edge, make_rows, scatter


@given(st.lists(st.integers(0, 150), max_size=30), st.sets(st.integers(0, 29)))
def test_the_budget_holds_and_everyone_is_admitted_in_order(sizes, cancelled):
    async def work():
        budget, active, order = Budget(100), [], []

        async def one(index, size):
            async with budget.reserve(size):
                active.append(size)
                order.append(index)
                assert sum(active) <= budget.used
                # what exceeds the limit goes alone
                assert budget.used <= 100 or sum(active) == max(active)
                try:
                    await asyncio.sleep(0)
                finally:
                    active.remove(size)

        tasks = [asyncio.create_task(one(index, size)) for index, size in enumerate(sizes)]
        await asyncio.sleep(0)
        for index in cancelled & set(range(len(sizes))):
            tasks[index].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ended), ended
        return budget, order

    budget, order = asyncio.run(work())
    assert budget.used == 0
    assert order == sorted(order)
    assert set(order) >= set(range(len(sizes))) - cancelled


def test_traffic_since_a_snapshot_is_what_came_after_it_by_way_and_worker():
    traffic = Traffic("0", {"0": "a", "1": "a", "2": "b"})
    traffic.add_message("2", 5)
    traffic.add_shared("1", 7)
    before = traffic.snapshot()
    traffic.add_message("2", 10)
    traffic.add_shared("1", 20)
    traffic.early += 3
    since = traffic.since(before)
    assert (since.messages, since.shared_memory, since.early) == (10, 20, 3)
    assert (since.total, since.between_hosts) == (30, 10)
    assert (since.by_worker, since.shared_by_worker) == ({"2": 10, "1": 20}, {"1": 20})
    assert before.total == 12, "a snapshot went on counting"


@pytest.mark.parametrize("sources", [("0", "1", "2", "3", "4"), ("0", "1")])
def test_messages_into_a_worker_are_bounded_however_many_sources_it_has(sources):
    """The worker's own rows take none of them."""
    e, table = edge(sources, ("1",), Rows.BALANCED), make_rows(400)
    in_flight = []
    most = 0

    async def pull():
        buffers, transport = buffers_of([e], "messages")

        async def counted(handle, request):
            nonlocal most
            if request.op != Op.FETCH:
                return await handle(request)
            in_flight.append(request)
            most = max(most, len(in_flight))
            await asyncio.sleep(0)
            reply = await handle(request)
            in_flight.remove(request)
            return reply

        for source, part in scatter(table, sources).items():
            transport.handlers[source] = partial(counted, transport.handlers[source])
            await buffers[source].publish(e, ITERATION, part)
        return await buffers["1"].pull(e, e, ITERATION)

    assert asyncio.run(pull()).equals(table)
    assert most == 16
