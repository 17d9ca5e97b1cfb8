"""Conformance tests of carriers (``Carrier``). Subclass ``CarrierTests`` in a test module and
define ``joined``:

class TestMyCarrier(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        ...  # serve ``handler`` as worker "b" yield carrier, die  # a carrier that asks for worker
        "a"; ``die()`` ends "b" as a crash would

"""

from __future__ import annotations

import asyncio
import sys
from abc import abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import ClassVar
from uuid import uuid4

import pytest

from siirl_dask.comms.wire import Frame, Pieces
from siirl_dask.coordinator.transport.messages import Handler, Op, Reply, Request, TransitionKey
from siirl_dask.coordinator.transport.peers import Carrier
from siirl_dask.errors import Aborted, PeerError

RUN = f"conformance-{uuid4().hex}"
"""Another in each process: names of sockets are made of it."""
KEY = TransitionKey(RUN, 7, "train/a->b")
Die = Callable[[], Awaitable[None]]
"""Ends worker "b" as a crash would."""


class CarrierTests:
    """Tests that every carrier must pass."""

    receives_into_places: ClassVar[bool] = True
    """Whether frames of a reply are received into the places of the request, if it has some."""

    @abstractmethod
    def joined(self, handler: Handler) -> AbstractAsyncContextManager[tuple[Carrier, Die]]:
        """Connect workers "a" and "b"; see the module's docstring."""

    def test_a_request_and_its_reply_arrive_as_they_were_sent(self) -> None:
        body = {
            "rows": b"\x00\xff" * 100,
            "columns": ["a", "é"],
            "target": None,
            "n": 2**40,
            "nested": [[1], {"b": []}],
        }
        frames: list[Frame] = [
            b"",
            b"x",
            bytes(range(256)) * 10_000,
            memoryview(array("i", [1, 2, 3])).cast("B"),
        ]
        received: list[Request] = []

        async def handler(request: Request) -> Reply:
            received.append(request)
            return Reply({"rows": 3, "text": "é"}, frames)

        async def work() -> Reply:
            async with self.joined(handler) as (carrier, _):
                assert await carrier.reaches("b")
                return await carrier.ask("b", Request(Op.FETCH, KEY, body))

        reply = asyncio.run(work())
        assert received[0].op == Op.FETCH
        assert received[0].key == KEY
        assert received[0].body["rows"] == body["rows"]
        assert list(received[0].body["columns"]) == body["columns"]
        assert received[0].body["n"] == 2**40
        assert reply.header == {"rows": 3, "text": "é"}
        assert [bytes(frame) for frame in reply.frames] == [bytes(frame) for frame in frames]

    def test_frames_in_pieces_arrive_as_they_lie_at_their_places_or_in_frames(self) -> None:
        """More of them than the kernel takes at once, from and to anywhere."""
        source = bytes(range(256)) * 4000
        pieces = [memoryview(source)[at : at + 200] for at in range(0, 900_000, 300)]
        whole = b"".join(pieces)
        target = bytearray(2 * len(whole))
        starts = range(0, 2 * len(whole), 1000)
        asked: list[object] = []

        def places(header: object, sizes: Sequence[int]) -> list[Pieces | None]:
            asked.append((header, list(sizes)))
            views = [memoryview(target)[start : start + 500] for start in starts]
            return [None, Pieces(views)]

        async def handler(request: Request) -> Reply:
            return Reply({"n": 1}, [b"other", Pieces(pieces)])

        async def work() -> Reply:
            async with self.joined(handler) as (carrier, _):
                assert await carrier.reaches("b")
                request = Request(Op.FETCH, KEY, row_bytes=len(whole), places=places)
                return await carrier.ask("b", request)

        reply = asyncio.run(work())
        assert reply.header == {"n": 1}
        assert reply.nbytes == len(whole) + 5
        assert [bytes(frame) for frame in reply.frames] == [b"other", whole]
        assert bool(asked) == self.receives_into_places
        if asked:
            assert asked == [({"n": 1}, [5, len(whole)])]
            assert b"".join(target[start : start + 500] for start in starts) == whole
            assert not any(any(target[start + 500 : start + 1000]) for start in starts)

    def test_a_profiler_that_holds_frames_of_functions_loses_no_message(self) -> None:
        """A frame keeps the views of buffers that its function had: Dask's profiler holds frames
        of other threads.
        """

        async def handler(request: Request) -> Reply:
            return Reply({"n": request.body["n"]}, [bytes(1000), bytes(2000)])

        async def work() -> list[int]:
            async with self.joined(handler) as (carrier, _):
                assert await carrier.reaches("b")
                sizes = []
                for n in range(3):
                    reply = await carrier.ask(
                        "b", Request(Op.FETCH, KEY, {"n": n, "rows": bytes(1000)})
                    )
                    sizes.append(reply.nbytes)
                return sizes

        held = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, value: held.append(frame))
        try:
            sizes = asyncio.run(work())
        finally:
            sys.setprofile(before)
        assert sizes == [3000, 3000, 3000]

    def test_a_slow_answer_holds_up_no_other(self) -> None:
        async def work() -> list[int]:
            first = asyncio.Event()

            async def handler(request: Request) -> Reply:
                if request.body["n"] == 0:
                    await first.wait()
                return Reply({"n": request.body["n"]})

            async with self.joined(handler) as (carrier, _):
                slow = asyncio.create_task(
                    carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY, {"n": 0}))
                )
                await asyncio.sleep(0)
                asks = (
                    carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY, {"n": n}))
                    for n in range(1, 20)
                )
                rest = [reply.header["n"] for reply in await asyncio.gather(*asks)]
                assert not slow.done()
                first.set()
                return [(await slow).header["n"], *rest]

        assert asyncio.run(work()) == list(range(20))

    def test_a_refusal_is_raised_with_the_words_of_the_peer(self) -> None:
        async def handler(request: Request) -> Reply:
            raise PeerError("it was another edge")

        async def work() -> None:
            async with self.joined(handler) as (carrier, _):
                for _ in range(2):
                    with pytest.raises(PeerError, match="it was another edge"):
                        await carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY))

        asyncio.run(work())

    @pytest.mark.parametrize("waiting", [True, False])
    def test_a_peer_that_dies_is_an_error_at_once(self, waiting: bool) -> None:
        async def work() -> None:
            asked = asyncio.Event()

            async def handler(request: Request) -> Reply:
                asked.set()
                if request.body:
                    await asyncio.Event().wait()
                return Reply()

            async with self.joined(handler) as (carrier, die):
                await carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY))
                if waiting:
                    asked.clear()
                    asking = asyncio.create_task(
                        carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY, {"n": 1}))
                    )
                    await asked.wait()
                    await die()
                else:
                    await die()
                    asking = asyncio.create_task(
                        carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY, {"n": 1}))
                    )
                with pytest.raises(OSError):  # noqa: PT011  # any: refused, reset, closed
                    await asyncio.wait_for(asking, 20)

        asyncio.run(work())

    def test_a_process_runs_until_it_dies_whether_it_answers_or_not(self) -> None:
        async def handler(request: Request) -> Reply:
            return Reply()

        async def work() -> list[bool]:
            async with self.joined(handler) as (carrier, die):
                await carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY))
                before = await carrier.runs("b", 5.0)
                await die()
                while await carrier.runs("b", 0.1):
                    await asyncio.sleep(0.01)
                return [before, await carrier.runs("b", 0.1)]

        assert asyncio.run(asyncio.wait_for(work(), 20)) == [True, False]

    def test_a_peer_that_is_aborted_is_gone(self) -> None:
        async def handler(request: Request) -> Reply:
            raise Aborted("the run is over")

        async def work() -> None:
            async with self.joined(handler) as (carrier, _):
                with pytest.raises(OSError):  # noqa: PT011
                    await asyncio.wait_for(
                        carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY)), 20
                    )

        asyncio.run(work())

    def test_a_request_that_is_given_up_ends_its_handler(self) -> None:
        """It would hold its connection, and its place among those that the peer answers."""

        async def work() -> None:
            began = asyncio.Event()
            ended = asyncio.Event()

            async def handler(request: Request) -> Reply:
                began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
                return Reply()

            async with self.joined(handler) as (carrier, _):
                asking = asyncio.create_task(carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY)))
                await began.wait()
                asking.cancel()
                await asyncio.wait_for(ended.wait(), 20)

        asyncio.run(work())

    def test_a_cancelled_request_spoils_none_after_it(self) -> None:
        async def work() -> list[int]:
            held = asyncio.Event()

            async def handler(request: Request) -> Reply:
                if request.body["n"] == -1:
                    await held.wait()
                return Reply({"n": request.body["n"]})

            async with self.joined(handler) as (carrier, _):
                asking = asyncio.create_task(
                    carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY, {"n": -1}))
                )
                await asyncio.sleep(0.05)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                held.set()
                return [
                    (await carrier.ask("b", Request(Op.SUBTREE_STATISTICS, KEY, {"n": n}))).header[
                        "n"
                    ]
                    for n in range(5)
                ]

        assert asyncio.run(work()) == list(range(5))
