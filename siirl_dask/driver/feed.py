"""Passes what a run's driver says on to readers in other threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

from siirl_dask.observe import Record, Summary

_HELD = 10_000  # newest records; older ones are in the run's metrics.jsonl


class RunFeed:
    """The records of a run in their order, and how it ends, for any number of readers."""

    def __init__(self) -> None:
        self.end: Future[Summary] = Future()
        """The summary, or the error that ended the run."""
        self._records: deque[Record] = deque(maxlen=_HELD)
        self._count = 0
        self._changed = threading.Condition()
        self._wakers: set[Callable[[], None]] = set()

    @property
    def last(self) -> Record | None:
        """The newest record; None before the first."""
        with self._changed:
            if self._records:
                return self._records[-1]
            return None

    def add(self, record: Record) -> None:
        """Take a record."""
        with self._changed:
            self._records.append(record)
            self._count += 1
            self._wake()

    def finish(self, outcome: Summary | BaseException) -> None:
        """Take the end of the run; no record comes after it."""
        with self._changed:
            if isinstance(outcome, BaseException):
                self.end.set_exception(outcome)
            else:
                self.end.set_result(outcome)
            self._wake()

    def __iter__(self) -> Iterator[Record]:
        """Yield each record as it comes, from the first that is held, until the run ends."""
        number = 0
        while True:
            with self._changed:
                while number >= self._count and not self.end.done():
                    self._changed.wait()
                records = self._after(number)
                number = self._count
            if not records:
                return
            yield from records

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Yield as ``__iter__`` does, and leave the event loop to others meanwhile."""
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._wakers.add(wake)
        try:
            number = 0
            while True:
                news.clear()
                with self._changed:
                    records = self._after(number)
                    number = self._count
                    is_over = self.end.done()
                for record in records:
                    yield record
                if is_over:
                    return
                await news.wait()
        finally:
            with self._changed:
                self._wakers.discard(wake)

    def _after(self, number: int) -> list[Record]:
        """Return the records from ``number`` on, as far as they are held."""
        first = self._count - len(self._records)
        return list(self._records)[max(0, number - first) :]

    def _wake(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()
