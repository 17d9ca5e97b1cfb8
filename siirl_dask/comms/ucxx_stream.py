"""Streams of bytes over endpoints of UCX, by ucxx: what ``byte_stream`` is for sockets.

UCX works inside the event loop, without a thread and without polling: its descriptor wakes the loop
(``ucp_worker_arm``). ucxx's own ``wait`` asks a request again and again whether it is done.

All bytes go by UCX's stream messages, which belong to one endpoint. A tagged message belongs to
whoever guesses its tag, and both sides would have to cut frames at the same bytes. The price is a
copy at the receiver where RDMA could write into place.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import ucxx
from ucxx import libucxx
from ucxx._lib.arr import Array  # ucxx has no other name for it

from siirl_dask.comms.byte_stream import CommStream

_TURN = 0.005  # seconds that UCX may work before others have their turn
_SHORT = 2**14  # bytes: shorter pieces are copied, since each request takes microseconds
_BATCH = 2**20  # bytes of short pieces that are copied into one request
_CLOSING = 1.0  # seconds that closing an endpoint may take
_UNCLAIMED = 0.05  # seconds in which what a peer sent before it closed can be read


class Operation:
    """Requests that somebody waits for. ConnectionError is raised where one of them fails."""

    __slots__ = ("_done", "_failure", "_held", "requests")

    def __init__(self, requests: list[Any], held: object, done: asyncio.Future[None]) -> None:
        self.requests = requests
        """The ones that UCX has not done yet."""
        self._held = held
        """Their memory. UCX uses it until they are done, and does not refer to it."""
        self._done = done
        self._failure = ""

    def check(self) -> bool:
        """Return whether all are done, and wake whoever waits then."""
        while self.requests and self.requests[-1].completed:
            try:
                self.requests.pop().check_error()
            except ucxx.exceptions.UCXError as error:
                # its words alone: its frames refer to the endpoint, which would keep the listener
                self._failure = f"{type(error).__name__}: {error}"
        if self.requests:
            return False
        self._held = None
        if not self._done.done():
            self._done.set_result(None)
        return True

    async def wait(self) -> None:
        await self._done
        if self._failure:
            raise ConnectionError(self._failure)


class UcxProgress:
    """Lets UCX work on one event loop, with a context of its own: Dask's comms over UCX have
    another.
    """

    running: ClassVar[dict[asyncio.AbstractEventLoop, UcxProgress]] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # the settings of Dask's comms, where these have begun, and of the environment
        context = libucxx.UCXContext(ucxx.get_config())
        self._worker = libucxx.UCXWorker(
            context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._descriptor = self._worker.epoll_file_descriptor
        self._operations: set[Operation] = set()
        self._closing: list[Any] = []
        """Endpoints that UCX has not closed yet."""
        self._users = 0
        self._works = False

    @classmethod
    def of_running_loop(cls) -> UcxProgress:
        """Return the one of the running loop. Whoever uses it calls ``acquire``."""
        loop = asyncio.get_running_loop()
        for each in [each for each in cls.running if each.is_closed()]:
            del cls.running[each]
        if loop not in cls.running:
            cls.running[loop] = UcxProgress(loop)
        return cls.running[loop]

    def acquire(self) -> None:
        if not self._users:
            self.loop.add_reader(self._descriptor, self.work)
        self._users += 1

    def release(self) -> None:
        """Undo ``acquire``. When nobody uses it any more, and all is closed, it ends."""
        self._users -= 1
        self._wake()

    def _end(self) -> None:
        self.loop.remove_reader(self._descriptor)
        self.running.pop(self.loop, None)

    def listen(self, port: int, on_endpoint: Callable[[Any], None]) -> Any:
        """Return a listener at every interface, which lives as long as somebody refers to it.
        ``on_endpoint`` is called inside UCX, and may not call it. OSError where the port is taken.
        """
        try:
            listener = libucxx.UCXListener.create(
                self._worker, port, on_endpoint, deliver_endpoint=True
            )
        except ucxx.exceptions.UCXBusyError as error:
            raise OSError(errno.EADDRINUSE, f"UCX cannot listen on port {port}: {error}") from error
        except ucxx.exceptions.UCXError as error:
            raise OSError(f"UCX cannot listen on port {port}: {error}") from error
        self.work()
        return listener

    def stream_to(self, host: str, port: int) -> UcxxStream:
        """Return a stream to a location, where nobody may listen: it ends then. ConnectionError
        where that is known at once.
        """
        self.acquire()
        try:
            endpoint = libucxx.UCXEndpoint.create(self._worker, host, port, True)
            self.work()
            return self.stream_of(endpoint)
        except ucxx.exceptions.UCXError as error:
            raise ConnectionError(f"UCX cannot connect to {host}:{port}: {error}") from error
        finally:
            self.release()

    def stream_of(self, endpoint: Any) -> UcxxStream:
        """Return the stream of an endpoint. ConnectionError where the peer has closed it."""
        self.acquire()
        try:
            return UcxxStream(self, endpoint)
        except ConnectionError:
            self.release()
            raise

    def close(self, endpoint: Any, operations: Collection[Operation]) -> None:
        """Close an endpoint at once. What it had begun has ended then, and uses no memory."""
        endpoint.remove_close_callback()
        self.drop(endpoint)
        end = time.monotonic() + _CLOSING
        self.work()
        while any(each.requests for each in operations) and time.monotonic() < end:
            self.work()

    def drop(self, endpoint: Any) -> None:
        """Begin to close an endpoint. What it had begun may use its memory until it is closed."""
        # of ucxx 0.52: close() of an endpoint that is closed ends the process, and close_blocking()
        # of one with a request under way never frees its listener
        if endpoint.alive:
            self.acquire()  # it is not over before the endpoint is closed
            endpoint.close()
            self._closing.append(endpoint)
            self.release()

    def begin(self, requests: list[Any], held: object) -> Operation:
        """Return what waits for requests. ``held`` is their memory, and is referred to until UCX
        uses it no more.
        """
        operation = Operation(requests, held, self.loop.create_future())
        self._operations.add(operation)
        self.work()
        return operation

    def work(self) -> None:
        """Have UCX do what there is to do, and wake those whose requests are done."""
        if self._works:  # it was called inside UCX
            return
        self._works = True
        end = time.monotonic() + _TURN
        try:
            while True:
                while self._worker.progress_once():
                    if time.monotonic() > end:
                        self.loop.call_soon(self.work)
                        return
                if self._worker.arm():
                    return
        finally:
            self._works = False
            self._wake()

    def _wake(self) -> None:
        for operation in [*self._operations]:
            if operation.check():
                self._operations.discard(operation)
        self._closing = [endpoint for endpoint in self._closing if endpoint.alive]
        if not self._users and not self._closing:
            self._end()


class UcxxStream(CommStream):
    """Reads and writes one endpoint on the running event loop. UCX says nothing of the peer."""

    def __init__(self, progress: UcxProgress, endpoint: Any) -> None:
        """``progress`` counts this as a user until it is closed: see its ``stream_of``."""
        super().__init__()
        try:
            endpoint.set_close_callback(self._on_close)
        except RuntimeError as error:
            raise ConnectionRefusedError(
                f"nobody listens there, or not any more: {error}"
            ) from None
        self._progress = progress
        self._endpoint = endpoint
        self._operations: set[Operation] = set()
        """The read and the write that are under way."""

    async def write(self, views: Sequence[memoryview]) -> None:
        """Send the bytes of ``views``; return when UCX needs them no more."""
        self._check_open()
        buffers = [
            batch[0] if len(batch) == 1 else memoryview(b"".join(batch))
            for batch in _batches(views)
        ]
        arrays = [Array(buffer) for buffer in buffers]
        await self._finish([self._endpoint.stream_send(array) for array in arrays], arrays)

    async def read(self, size: int) -> bytearray:
        """Return the next ``size`` bytes."""
        data = bytearray(size)
        await self.read_into([memoryview(data)])
        return data

    async def read_into(self, places: Sequence[memoryview]) -> None:
        """Fill the places with the next bytes, in their order."""
        self._check_open()
        batches = list(_batches(places))
        buffers = []
        for batch in batches:
            if len(batch) == 1:
                buffers.append(batch[0])
            else:
                buffers.append(memoryview(bytearray(sum(place.nbytes for place in batch))))
        arrays = [Array(buffer) for buffer in buffers]
        await self._finish([self._endpoint.stream_recv(array) for array in arrays], arrays)
        for batch, buffer in zip(batches, buffers, strict=True):
            if len(batch) == 1:
                continue
            first = 0
            for place in batch:
                place[:] = buffer[first : first + place.nbytes]
                first += place.nbytes

    def _close(self) -> None:
        self._progress.close(self._endpoint, self._operations)
        self._endpoint = None  # it keeps the listener that it came from alive
        self._progress.release()

    async def _finish(self, requests: list[Any], held: object) -> None:
        """Wait for requests, whose memory is ``held``."""
        operation = self._progress.begin(requests, held)
        self._operations.add(operation)
        try:
            await operation.wait()
        except asyncio.CancelledError:
            self.close(ConnectionError("a read or a write was cancelled"))
            raise
        except ConnectionError as error:
            self.close(error)
            self._check_open()
        finally:
            self._operations.discard(operation)

    def _on_close(self, *_: object) -> None:
        """UCX calls it, and may not be called by it."""
        self._progress.loop.call_soon(self._end)

    def _end(self) -> None:
        self._ended = True
        self._notify_end()
        closing = ConnectionResetError("the peer has closed it")
        self._progress.loop.call_later(_UNCLAIMED, self.close, closing)


def _batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the views that go in one request: one that is long by itself, or short ones."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        if not view.nbytes:
            continue
        if batch and (view.nbytes >= _SHORT or size >= _BATCH):
            yield batch
            batch = []
            size = 0
        if view.nbytes >= _SHORT:
            yield [view]
            continue
        batch.append(view)
        size += view.nbytes
    if batch:
        yield batch
