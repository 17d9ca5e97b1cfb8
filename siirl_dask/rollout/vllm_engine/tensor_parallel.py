"""Shares the requests of a tensor-parallel engine's ranks: all ranks compute each row, its own
worker keeps the result.

A tensor-parallel engine (Megatron-LM, arXiv:1909.08053) has a slice of every weight on each rank,
and all ranks go through the same batches together. Rows stay where the plan puts them: whenever the
engine has room the ranks exchange the requests that each of them has by then, which are small, and
all begin the union in the same order. So a rank may have requests that depend on earlier results,
such as the next turn of an episode.

New weights arrive at each worker at a time of its own. Ranks that load them while they generate
exchange before each step whether theirs are there, and all load between the same two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import msgpack

from siirl_dask.context import ArrivingWeights
from siirl_dask.errors import PeerError
from siirl_dask.rollout.engine import Generation, GenerationRequest, RequestQueue
from siirl_dask.rollout.requests import RequestMessage

Gather = Callable[[bytes, Callable[[], None]], Sequence[bytes]]
"""``gather(message, check)`` returns the messages of all ranks of the engine, in order; all of them
must call. ``check`` is called now and then while it waits: what it raises ends the wait."""
Ticket = tuple[Any] | None
"""The ticket of this rank's own queue; None for a request of another rank."""
# seconds between two exchanges while no rank has a request: as long as the wait has taken so far
_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.016


class TensorParallelQueue:
    """A RequestQueue that holds the requests of all ranks of an engine, in the same order on every
    rank.

    Each rank must ask it for as many requests at a time as the others do.
    """

    def __init__(
        self,
        queue: RequestQueue,
        gather: Gather,
        *,
        rank: int,
        size: int,
        version: int,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``queue`` holds the requests of this rank, one of ``size``, for weights of ``version``.
        ``waiting()`` is entered for what waits for other ranks.
        """
        self._queue = queue
        self._gather = gather
        self._rank = rank
        self._size = size
        self._waiting = waiting
        self._own_message = RequestMessage(version)
        # an image is sent once while an engine serves, however many turns show it
        self._readers = [RequestMessage(version) for _ in range(size)]
        self._ended = [False] * size
        self._exchanges = 0

    def next(self, limit: int, *, wait: bool) -> list[tuple[Ticket, GenerationRequest]]:
        """Return up to ``limit`` requests, those that ranks have by now; with ``wait`` none only
        when no rank will have any.

        PeerError when a rank sends something else, or requests for other weights.
        """
        start = time.monotonic()
        with ExitStack() as stack:
            waits_for_others = False
            while True:
                taken = self._exchange(limit)
                if taken or not wait or all(self._ended):
                    return taken
                if self._ended[self._rank] and not waits_for_others:
                    stack.enter_context(self._waiting())
                    waits_for_others = True
                waited = time.monotonic() - start
                time.sleep(min(max(waited, _SHORTEST_PAUSE), _LONGEST_PAUSE))

    def complete(self, ticket: Ticket, result: Generation) -> None:
        """Pass the result on to this rank's queue if the request is its own."""
        if ticket is not None:
            self._queue.complete(ticket[0], result)

    def ended(self) -> bool:
        """Return whether no rank will have more requests."""
        return all(self._ended)

    def gather(self, message: bytes) -> Sequence[bytes]:
        """Return the messages of all ranks, which must all call. A wait that is long enough to be
        checked counts as waiting for them.
        """
        with ExitStack() as stack:
            waits = False

            def check() -> None:
                nonlocal waits
                self._queue.ended()
                if not waits:
                    stack.enter_context(self._waiting())
                    waits = True

            return self._gather(message, check)

    def _exchange(self, limit: int) -> list[tuple[Ticket, GenerationRequest]]:
        """Return the requests that all ranks have by now, the first of each rank, then the second:
        each worker has put its costliest requests first.
        """
        if all(self._ended):
            # no request is left, but a queue may return results of others' items when it is asked
            self._queue.next(0, wait=False)
            return []
        shares = self._shares(limit)
        own = self._queue.next(shares[self._rank], wait=False)
        ended = self._queue.ended()
        messages = self.gather(self._packed([request for _, request in own], ended=ended))
        self._ended[self._rank] = ended
        placed: list[tuple[int, int, Ticket, GenerationRequest]] = []
        for owner, message in enumerate(messages):
            if owner == self._rank:
                for place, (ticket, request) in enumerate(own):
                    placed.append((place, owner, (ticket,), request))
                continue
            for place, request in enumerate(self._read(owner, message, shares[owner])):
                placed.append((place, owner, None, request))
        placed.sort(key=lambda one: one[:2])
        return [(ticket, request) for _, _, ticket, request in placed]

    def _shares(self, limit: int) -> list[int]:
        """Return the most requests of each rank that make up ``limit``; the ranks take turns with
        what does not divide.
        """
        self._exchanges += 1
        each, more = divmod(limit, self._size)
        return [each + ((rank - self._exchanges) % self._size < more) for rank in range(self._size)]

    def _packed(self, requests: Sequence[GenerationRequest], *, ended: bool) -> bytes:
        """Return this rank's message: nothing at all where there is nothing new to say."""
        if not requests and ended == self._ended[self._rank]:
            return b""
        packed: bytes = msgpack.packb([ended, [*map(self._own_message.pack, requests)]])
        return packed

    def _read(self, owner: int, message: bytes, most: int) -> list[GenerationRequest]:
        """Return the requests in a rank's message. PeerError for anything else, and for more than
        ``most``.
        """
        if not message:
            return []
        value = _unpacked(message)
        match value:
            case [bool(ended), list(requests)] if len(requests) <= most:
                self._ended[owner] = ended
                return [self._readers[owner].read(request) for request in requests]
        raise PeerError(
            f"received {str(value)[:80]!r}: expected at most {most} generation requests, and "
            "whether they are the last"
        )


class TensorParallelWeights:
    """ArrivingWeights of a rank of an engine, which have arrived once they are on all ranks.

    Each rank must ask it as often as the others do, between the same steps.
    """

    def __init__(
        self,
        weights: ArrivingWeights,
        gather: Callable[[bytes], Sequence[bytes]],
        version: Callable[[], int],
    ) -> None:
        """``weights`` are those of this rank's worker; ``gather(message)`` returns the messages of
        all ranks; ``version()`` is the version of the weights that this rank computes with.
        """
        self._weights = weights
        self._gather = gather
        self._version = version

    def arrived(self) -> bool:
        """Return whether weights have arrived at all ranks. PeerError when ranks have different
        weights by now, or one sends something else.
        """
        own = self._version()
        message = b""  # nothing is sent between two arrivals
        if self._weights.arrived():
            message = msgpack.packb(own)
        messages = self._gather(message)
        for rank, other in enumerate(messages):
            if other and _read_version(other) != own:
                raise PeerError(
                    f"rank {rank} of the engine computes with weights of version "
                    f"{_read_version(other)}: those here are {own}"
                )
        return all(messages)

    def load(self) -> None:
        """Load them into this rank."""
        self._weights.load()


def _read_version(message: bytes) -> int:
    """Return the version in a rank's message. PeerError for anything else."""
    version = _unpacked(message)
    if not isinstance(version, int):
        raise PeerError(f"received {message[:40]!r}, which is no version of weights")
    return version


def _unpacked(message: bytes) -> Any:
    """Return what a rank has packed. PeerError for what is not packed."""
    try:
        return msgpack.unpackb(message)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(
            f"received {message[:40]!r}, which are no generation requests and no version: {error}"
        ) from error
