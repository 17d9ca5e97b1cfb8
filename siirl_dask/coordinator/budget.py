"""A number of bytes that may be under way at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Budget:
    """Waits, first come first served, until there is room. What is larger than the whole may go when nothing else does.

    Belongs to one event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def room_for(self, size: int) -> AsyncIterator[None]:
        await self.take(size)
        try:
            yield
        finally:
            self.give(size)

    async def take(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self.used += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)  # was let in and cancelled in the same moment
            else:
                with suppress(ValueError):  # it was passed over already
                    self._waiting.remove((size, turn))
                self._let_in()
            raise

    def give(self, size: int) -> None:
        self.used -= size
        self._let_in()

    def _fits(self, size: int) -> bool:
        return self.used == 0 or self.used + size <= self.limit

    def _let_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self.used += size
            turn.set_result(None)
