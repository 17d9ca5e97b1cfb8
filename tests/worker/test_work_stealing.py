"""Work stealing: every item is computed once, and every owner gets its results in order."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.context import Codec
from siirl_dask.coordinator.databuffer.serving import Window
from siirl_dask.coordinator.transport.messages import Op, Request, TransitionKey
from siirl_dask.errors import Aborted, PeerError
from siirl_dask.rollout import GenerationRequest, Sampling
from siirl_dask.rollout.requests import RequestMessage
from siirl_dask.rollout.vllm_engine.tensor_parallel import TensorParallelQueue
from siirl_dask.testing.local_pool import LocalTransport
from siirl_dask.worker.peers.work_stealing import (
    MESSAGE,
    ExpectedWork,
    LoopBridge,
    StealableQueue,
    StealService,
    WorkQueue,
    pack,
)
from siirl_dask.worker.stop import StopFlag, result_of
from tests.rollout.test_tensor_parallel_queue import gathering

KEY = TransitionKey("run", 3, "train/rollout/0")
ONE = Sampling(max_tokens=1)


def plain(value):
    return value


WORK = ExpectedWork(Window(ahead=3), {"train/rollout"})
CODEC = Codec(plain, plain, plain, plain)


class Role:
    """Workers in threads of one process, and the loop that serves them."""

    def __init__(self, workers):
        self.names = [f"w{i}" for i in range(workers)]
        self.handlers = {}
        transport = LocalTransport(self.handlers)
        self.services = {name: StealService("run", transport, WORK) for name in self.names}
        self.handlers.update({name: service.handle for name, service in self.services.items()})
        self.stop = StopFlag()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def work(self, name, items, on_result=None, codec=CODEC):
        at = self.names.index(name)
        submit = partial(asyncio.run_coroutine_threadsafe, loop=self.loop)
        bridge = LoopBridge(submit, partial(result_of, stop=self.stop), self.stop.check)
        peers = self.names[at + 1 :] + self.names[:at]
        return StealableQueue(
            WorkQueue(items, codec, on_result), KEY, peers, self.services[name], bridge
        )

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    batch=st.integers(1, 7),
    patient=st.booleans(),
)
def test_every_item_is_computed_once_and_returned_to_its_owner(counts, batch, patient):
    done, lock = [], threading.Lock()

    def go_through(work):
        while taken := work.next(batch, wait=True):
            while taken:
                ticket, item = taken.pop()
                with lock:
                    done.append(item)
                work.complete(ticket, item * 2)
                if not patient and not taken:
                    taken = list(work.next(batch, wait=False))
        return work.results()

    with Role(len(counts)) as role, ThreadPoolExecutor(len(counts)) as threads:
        items = [[100 * worker + at for at in range(count)] for worker, count in enumerate(counts)]
        begin = zip(role.names, items, strict=True)
        running = [
            threads.submit(lambda name, own: go_through(role.work(name, own)), *pair)
            for pair in begin
        ]
        results = [one.result(60) for one in running]
    assert sorted(done) == sorted(item for own in items for item in own)
    assert results == [[item * 2 for item in own] for own in items]


def test_an_idle_worker_steals_half_of_what_waits_and_nothing_begun():
    with Role(2) as role:
        busy = role.work("w0", list(range(9)))
        assert [item for _, item in busy.next(3, wait=True)] == [0, 1, 2]
        idle = role.work("w1", [])
        first = idle.next(10, wait=True)
        assert [item for _, item in first] == [8, 7, 6]
        assert [item for _, item in busy.next(10, wait=True)] == [3, 4, 5]
        assert idle.next(10, wait=True) == []
        for ticket, item in first:
            idle.complete(ticket, -item)
        assert idle.results() == []
        assert idle.taken_over == 3


def test_an_owner_hears_of_each_result_once_also_of_those_that_a_peer_computed():
    heard = []
    with Role(2) as role:
        busy = role.work(
            "w0", list(range(9)), lambda number, result: heard.append((number, result))
        )
        own = busy.next(3, wait=True)
        idle = role.work("w1", [])
        stolen = idle.next(10, wait=True)
        for ticket, item in stolen:
            idle.complete(ticket, -item)
        idle.results()
        for ticket, item in [*own, *busy.next(10, wait=True)]:
            busy.complete(ticket, -item)
        assert busy.results() == [-item for item in range(9)]
    assert len(stolen) == 3
    assert sorted(heard) == [(item, -item) for item in range(9)]


def test_waiting_for_results_ends_when_the_worker_is_stopped():
    with Role(2) as role:
        busy, idle = role.work("w0", [1, 2]), role.work("w1", [])
        taken = idle.next(1, wait=True)
        for ticket, _ in busy.next(2, wait=True):
            busy.complete(ticket, 0)
        assert len(taken) == 1
        role.stop.set("enough")
        with pytest.raises(Aborted, match="enough"):
            busy.results()


def test_a_worker_that_is_stopped_wakes_the_peers_that_ask_it():
    with Role(2) as role:
        waiting = asyncio.run_coroutine_threadsafe(
            role.services["w1"].steal_from("w0", KEY, 1, CODEC), role.loop
        )
        role.loop.call_soon_threadsafe(role.services["w0"].abort, "gone")
        with pytest.raises(Aborted, match="gone"):
            waiting.result(60)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Op.STEAL, KEY, {"limit": 0}), "asked for 0 items"),
        (Request(Op.STEAL, KEY, {"limit": "all"}), "asked for 'all' items"),
        (Request(Op.RETURN, KEY, {"results": pack(0, 1)}), "item 0, which no peer has"),
        (Request(Op.RETURN, KEY, {"results": pack(0, 1)[:-1]}), "cut off"),
        (Request(Op.RETURN, KEY, {"results": b"x"}), "whole messages"),
        (
            Request(Op.STEAL, TransitionKey("run", 4, KEY.edge), {"limit": 1}),
            "iteration 4: expected at most 3",
        ),
        (
            Request(Op.STEAL, TransitionKey("run", 3, "train/rollout/1024"), {"limit": 1}),
            "no such work here",
        ),
        (
            Request(Op.STEAL, TransitionKey("run", 3, "train/other/0"), {"limit": 1}),
            "no such work here",
        ),
        (Request(Op.RETURN, KEY, {}), "expected bytes"),
        (Request(Op.STEAL, TransitionKey("other", 3, KEY.edge), {"limit": 1}), "no such work here"),
        (Request(Op.STEAL, TransitionKey("run", 1, KEY.edge), {"limit": 1}), "no such work here"),
    ],
)
def test_malformed_requests_of_a_peer_are_refused(request_, message):
    with Role(1) as role:
        role.work("w0", [5])
        role.loop.call_soon_threadsafe(role.services["w0"].forget, 2)
        with pytest.raises(PeerError, match=message):
            role.call(role.services["w0"].handle(request_))


def test_results_larger_than_a_message_come_back_in_several():
    """64 results of 65,536 tokens were one message, larger than a link took."""
    sizes, large = [], b"x" * (MESSAGE // 2)
    with Role(2) as role:
        handle = role.handlers["w0"]

        async def weigh(request):
            sizes.append(len(request.body.get("results", b"")))
            return await handle(request)

        role.handlers["w0"] = weigh
        busy, idle = role.work("w0", list(range(10))), role.work("w1", [])
        for ticket, _ in idle.next(5, wait=True):
            idle.complete(ticket, large)
        assert idle.results() == []
        for ticket, _ in busy.next(5, wait=True):
            busy.complete(ticket, large)
        assert busy.results() == [large] * 10
    assert len([size for size in sizes if size]) == 5
    assert max(sizes) <= MESSAGE


def test_no_more_items_are_stolen_than_a_message_holds():
    with Role(2) as role:
        role.work("w0", [b"x" * (MESSAGE // 3)] * 20)
        assert len(role.work("w1", []).next(10, wait=True)) == 2


def test_engines_of_two_ranks_take_over_rows_of_each_other_and_compute_alike():
    """Ranks 2 and 3 have no rows and begin first: they take over rows of ranks 0 and 1."""
    items = [
        [GenerationRequest([rank, at], at, ONE) for at in range(20 - 15 * rank)] for rank in (0, 1)
    ]
    items += [[], []]
    message = RequestMessage(version=0)
    codec = Codec(message.pack, message.read, plain, plain)
    stolen = threading.Event()

    def serve(rank, work, gather):
        if rank < 2:
            assert stolen.wait(60)
        queue = TensorParallelQueue(work, gather, rank=rank % 2, size=2, version=0)
        order = []
        try:
            while taken := queue.next(4, wait=True):
                assert len(taken) <= 4
                for ticket, request in taken:
                    order.append(tuple(request.prompt))
                    queue.complete(ticket, request.prompt[0] * 100 + request.prompt[1])
                if rank >= 2:
                    stolen.set()
            assert work.ended()
            return work.results(), order, work.taken_over
        except BaseException:
            role.stop.set(f"rank {rank} failed")
            raise

    with Role(4) as role, ThreadPoolExecutor(4) as threads:
        works = [
            role.work(name, own, codec=codec) for name, own in zip(role.names, items, strict=True)
        ]
        gathers = [gathering(2) for _ in range(2)]
        running = [
            threads.submit(serve, rank, work, gathers[rank // 2](rank % 2))
            for rank, work in enumerate(works)
        ]
        found = [one.result(60) for one in running]
    orders = [order for _, order, _ in found]
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    assert sorted(orders[0] + orders[2]) == [(0, at) for at in range(20)] + [
        (1, at) for at in range(5)
    ]
    assert [results for results, _, _ in found] == [
        [*range(20)],
        [100 + at for at in range(5)],
        [],
        [],
    ]
    assert sum(taken for _, _, taken in found[2:]) > 0


def test_no_more_is_begun_than_was_asked_for_also_of_what_was_stolen_for_more():
    with Role(2) as role:
        role.work("w0", list(range(9)))
        idle = role.work("w1", [])
        assert idle.next(0, wait=False) == []
        assert not idle.ended()
        assert [item for _, item in idle.next(5, wait=True)] == [8, 7, 6, 5, 4]
        while not (first := idle.next(1, wait=True)):
            pass
        assert idle.next(0, wait=False) == []
        assert [item for _, item in first] == [3]
        stolen = []
        while taken := idle.next(1, wait=True):
            assert len(taken) == 1
            stolen += [item for _, item in taken]
        assert stolen == [2, 1, 0]
        assert idle.ended()
