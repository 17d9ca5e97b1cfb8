"""One engine on several workers: each samples its own rows, and all of them compute each.

A tensor-parallel engine (Megatron-LM, arXiv:1909.08053) has a slice of every weight on each of its ranks, which go
through the same batches together. Rows stay where the plan puts them: the ranks tell each other their requests, which
are small, all serve the union in the same order, and each keeps the results of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

from siirl_dask.errors import PeerError
from siirl_dask.rollout.engine import Generation, GenerationRequest, RequestQueue
from siirl_dask.rollout.requests import pack_request, read_request

_ALL = 2**31
Gather = Callable[[bytes], Sequence[bytes]]
"""What each rank of the engine gives, in the order of ranks; all of them must call."""


class TensorParallelQueue:
    """The work of all ranks of an engine, as rank ``rank`` of them: on each of them the same requests, in the same
    order. Each brings all that it has, and must be asked for as much at a time as the others are.
    """

    def __init__(self, queue: RequestQueue, gather: Gather, rank: int, version: int) -> None:
        """PeerError when a rank sends what are no requests, or requests for other weights than of ``version``."""
        own = list(_everything(queue))
        parts = [_read(message, version) for message in gather(_packed([request for _, request in own], version))]
        # The first of each rank, then the second: each worker has sorted its own by what is best begun first.
        places = sorted((place, of) for of, part in enumerate(parts) for place in range(len(part)))
        self._waiting = deque(((of, place), parts[of][place]) for place, of in places)
        self._queue, self._rank, self._tickets = queue, rank, [ticket for ticket, _ in own]

    def next(self, limit: int, *, wait: bool) -> list[tuple[tuple[int, int], GenerationRequest]]:
        return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

    def complete(self, ticket: tuple[int, int], result: Generation) -> None:
        """Kept by the rank whose request it was."""
        of, place = ticket
        if of == self._rank:
            self._queue.complete(self._tickets[place], result)


def _everything(queue: RequestQueue) -> Iterator[tuple[Any, GenerationRequest]]:
    while taken := queue.next(_ALL, wait=True):
        yield from taken


def _packed(requests: Sequence[GenerationRequest], version: int) -> bytes:
    packed: bytes = msgpack.packb([pack_request(request, version) for request in requests])
    return packed


def _read(message: bytes, version: int) -> list[GenerationRequest]:
    try:
        given = msgpack.unpackb(message)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(f"received {message[:40]!r}, which are no generation requests: {error}") from error
    if not isinstance(given, list):
        raise PeerError(f"received {str(given)[:80]!r}: expected a list of generation requests")
    return [read_request(one, version) for one in given]
