"""Shares the requests of a tensor-parallel engine's ranks: all ranks compute each row, its own
worker keeps the result.

A tensor-parallel engine (Megatron-LM, arXiv:1909.08053) has a slice of every weight on each rank,
and all ranks go through the same batches together. Rows stay where the plan puts them: the ranks
exchange their requests, which are small, and all serve the union in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

from siirl_dask.errors import PeerError
from siirl_dask.rollout.engine import Generation, GenerationRequest, RequestQueue
from siirl_dask.rollout.requests import RequestMessage

_ALL = 2**31
Gather = Callable[[bytes], Sequence[bytes]]
"""Returns the messages of all ranks of the engine, in order; all of them must call."""


class TensorParallelQueue:
    """A RequestQueue that holds the requests of all ranks of an engine, in the same order on every
    rank.

    Each rank must ask it for as many requests at a time as the others do.
    """

    def __init__(self, queue: RequestQueue, gather: Gather, rank: int, version: int) -> None:
        """Gather the requests of all ranks.

        PeerError when a rank sends something else, or requests for other weights than ``version``.
        """
        own = list(_everything(queue))
        parts = [
            _read(message, version)
            for message in gather(_packed([request for _, request in own], version))
        ]
        # The first of each rank, then the second: each worker has put its costliest requests first.
        places = sorted(
            (place, owner) for owner, part in enumerate(parts) for place in range(len(part))
        )
        self._waiting = deque(((owner, place), parts[owner][place]) for place, owner in places)
        self._queue = queue
        self._rank = rank
        self._tickets = [ticket for ticket, _ in own]

    def next(self, limit: int, *, wait: bool) -> list[tuple[tuple[int, int], GenerationRequest]]:
        """Return up to ``limit`` requests; a ticket is the rank that owns the request and its
        place there.
        """
        return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

    def complete(self, ticket: tuple[int, int], result: Generation) -> None:
        """Keep the result if the request is this rank's."""
        owner, place = ticket
        if owner == self._rank:
            self._queue.complete(self._tickets[place], result)


def _everything(queue: RequestQueue) -> Iterator[tuple[Any, GenerationRequest]]:
    while requests := queue.next(_ALL, wait=True):
        yield from requests


def _packed(requests: Sequence[GenerationRequest], version: int) -> bytes:
    packed: bytes = msgpack.packb([*map(RequestMessage(version).pack, requests)])
    return packed


def _read(message: bytes, version: int) -> list[GenerationRequest]:
    try:
        requests = msgpack.unpackb(message)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(
            f"received {message[:40]!r}, which are no generation requests: {error}"
        ) from error
    if not isinstance(requests, list):
        raise PeerError(f"received {str(requests)[:80]!r}: expected a list of generation requests")
    return [*map(RequestMessage(version).read, requests)]
