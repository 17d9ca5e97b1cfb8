"""The requests of a worker's queue that its engine's process has under way, and the answers to what
the engine asks of the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from siirl_dask.context import ArrivingWeights
from siirl_dask.errors import PeerError
from siirl_dask.rollout.engine import GenerationRequest, RequestQueue
from siirl_dask.rollout.requests import RequestMessage, read_sampled


class ServedRequests:
    """Answers an engine in another process for a queue, and knows which requests have no response
    yet.
    """

    def __init__(
        self,
        queue: RequestQueue,
        version: Callable[[], int],
        weights: ArrivingWeights | None,
    ) -> None:
        """``version()`` is that of the weights in use, ``weights`` are those that may arrive
        meanwhile, None: none.
        """
        self.delivered = 0
        """Responses."""
        self._queue = queue
        self._version = version
        self._weights = weights
        self._numbers = count()
        self._under_way: dict[int, tuple[Any, GenerationRequest]] = {}
        self._again: deque[int] = deque()

    def ask_again(self) -> int:
        """Give the next process all requests that have no response yet, in the order in which the
        queue gave them; returns their number.
        """
        self._again = deque(self._under_way)
        return len(self._again)

    def answer(self, name: str, value: Any) -> Any:
        """Return the answer to a message of the process. PeerError for one of another form."""
        match name, value:
            case "next", [int(limit), bool(wait)] if limit >= 0:
                return self._next(limit, wait=wait)
            case "ended", None:
                return False if self._again else self._queue.ended()
            case "complete", [int(number), sample] if number in self._under_way:
                generation = read_sampled(sample).generation
                ticket, _ = self._under_way.pop(number)
                self._queue.complete(ticket, generation)
                self.delivered += 1
                return None
            case "arrived", None if self._weights is not None:
                return self._weights.arrived()
            case "load", None if self._weights is not None:
                self._weights.load()
                return None
        raise PeerError(f"the engine's process sent {name!r} with {value!r:.200}")

    def _next(self, limit: int, *, wait: bool) -> list[list[Any]]:
        """Return up to ``limit`` requests with their numbers, as plain data."""
        if self._again:  # alone: the engine that was lost had them as one batch
            numbers = [self._again.popleft() for _ in range(min(limit, len(self._again)))]
        else:
            numbers = []
            for ticket, request in self._queue.next(limit, wait=wait):
                number = next(self._numbers)
                self._under_way[number] = (ticket, request)
                numbers.append(number)
        message = RequestMessage(self._version())
        return [[number, message.pack(self._under_way[number][1])] for number in numbers]
