"""The requests of many agents, for one engine: a RequestQueue that is filled while the engine
serves it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

from siirl_dask.context import Device
from siirl_dask.rollout.engine import Generation, GenerationRequest

_SLICE = 0.1  # seconds within which the end of a run is noticed
# seconds that the first request waits for others, since some engines finish a batch before the next
_LINGER = 0.02

Ticket = Future[Generation]


class AgentQueue:
    """Hands an engine the requests that agents send. The engine's thread takes them, the
    server's thread adds them.
    """

    def __init__(self, device: Device, check: Callable[[], None]) -> None:
        """``check`` is called now and then by the engine's thread while it waits; what it raises
        ends the wait.
        """
        self._device = device
        self._check = check
        self._waiting: deque[tuple[Ticket, GenerationRequest]] = deque()
        self._changed = threading.Condition()
        self._agents = 0
        self._ended = False
        self._under_way = 0

    def submit(self, request: GenerationRequest) -> Ticket:
        """Let the engine serve a request; the future gets its result. One that is cancelled in
        time is not begun.
        """
        ticket = Ticket()
        with self._changed:
            self._waiting.append((ticket, request))
            self._changed.notify_all()
        self._device.progress()
        return ticket

    def count_agents(self, more: int) -> None:
        """Note that so many more agents run, each of which may send a request."""
        with self._changed:
            self._agents += more
            self._changed.notify_all()

    def end(self) -> None:
        """Say that no more requests come."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def next(self, limit: int, *, wait: bool) -> list[tuple[Ticket, GenerationRequest]]:
        """Return up to ``limit`` requests. With ``wait``, none mean that all agents have ended."""
        with self._device.waiting() if wait else nullcontext():
            taken = self._take(limit, wait=wait)
        if taken:
            self._note(len(taken))
        return taken

    def ended(self) -> bool:
        """Return whether all agents have ended. Raises what ``check`` raises."""
        self._check()
        with self._changed:
            if self._waiting:
                return False
            return self._ended

    def complete(self, ticket: Ticket, result: Generation) -> None:
        """Give the result to the request's future."""
        ticket.set_result(result)
        self._note(-1)

    def _take(self, limit: int, *, wait: bool) -> list[tuple[Ticket, GenerationRequest]]:
        while True:
            if wait:
                self._await_some(limit)
            taken = list[tuple[Ticket, GenerationRequest]]()
            with self._changed:
                while self._waiting and len(taken) < limit:
                    ticket, request = self._waiting.popleft()
                    if ticket.set_running_or_notify_cancel():
                        taken.append((ticket, request))
                if taken or not wait or self._ended:
                    return taken

    def _await_some(self, limit: int) -> None:
        """Wait for a request, and a moment for those of other agents; return at once where all
        agents have ended.
        """
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait(_SLICE)
                self._check()
            until = time.monotonic() + _LINGER
            while len(self._waiting) < min(limit, self._agents) and not self._ended:
                if (left := until - time.monotonic()) <= 0:
                    return
                self._changed.wait(left)

    def _note(self, more: int) -> None:
        self._under_way += more
        self._device.engine_has(self._under_way)
        self._device.progress()
