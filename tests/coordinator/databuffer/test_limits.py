import asyncio

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.limits import Budget


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
