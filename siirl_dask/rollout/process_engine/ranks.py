"""Joins the processes of an engine of several ranks, one of which each of its workers has started.

The processes begin together and end together: a rank that is alone can generate nothing, and on a
device it would wait for the others for ever. So a worker whose process is gone says so in a store,
where the others look while theirs are silent. At the end of a call all workers tell each other how it
went, and all start another process or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import msgpack
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # no stubs

from siirl_dask.collectives import host_store, join_store, listen_at
from siirl_dask.context import Rank
from siirl_dask.errors import PeerError, RunError
from siirl_dask.rollout.process_engine.described_inputs import Meeting
from siirl_dask.rollout.process_engine.errors_as_data import describe_error, read_error
from siirl_dask.rollout.vllm_engine.process_groups import EngineRanks

_START = timedelta(minutes=10)
"""Most time between the starts of two processes, which import the same libraries."""


class AnotherRankEndedError(Exception):
    """The process of another rank is gone: this one is to be ended as well."""


def join(meeting: Meeting) -> Rank:
    """Make the default group of this process, over all processes of its engine. Returns the rank for
    the engine.
    """
    listen_at(meeting.host)
    address = join_store(meeting.store_host, meeting.store_port, meeting.timeout)
    store = PrefixStore(str(meeting.start), address)
    # a worker that is lost starts none
    store.set(f"process {meeting.rank}", "")
    store.wait([f"process {rank}" for rank in range(meeting.size)], _START)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("world", store),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timedelta(seconds=meeting.timeout),
    )
    world = dist.group.WORLD
    return Rank(meeting.rank, meeting.size, group=world, side_group=world, host=meeting.host)


class CallEnd(IntEnum):
    """How a call has ended on a rank."""

    DONE = 0
    LOST = 1
    """Its process is gone."""
    FOLLOWED = 2
    """Its process was ended since that of another rank is gone."""
    FAILED = 3
    """The engine raised, and its process was ended."""
    NOT_BUILT = 4
    """Its process is gone, which was building the engine."""


@dataclass(frozen=True, slots=True)
class CallEnds:
    """How a call has ended on all ranks."""

    by_rank: Sequence[CallEnd]
    errors: Sequence[Exception | None]
    """Exception of each rank in which the call raised one."""
    delivered: bool
    """Whether a response was delivered on any of them."""
    version: int
    """Newest version of the weights that a worker has. Others have older ones where a process was
    lost as ranks loaded weights in flight."""

    @property
    def done(self) -> bool:
        """Whether it was carried out on all of them."""
        return all(one is CallEnd.DONE for one in self.by_rank)

    @property
    def begins_again(self) -> bool:
        """Whether the call is to be made again: a process was lost. What ranks raised then follows
        from that.
        """
        if CallEnd.NOT_BUILT in self.by_rank:
            return False
        if CallEnd.LOST in self.by_rank:
            return True
        return CallEnd.FAILED not in self.by_rank

    @property
    def cause(self) -> Exception:
        """Exception that made the call fail on all ranks: that of the first rank whose process is
        gone, else of the first whose engine raised; last of one that only says that another is
        gone.
        """
        raised = [
            (end is not CallEnd.NOT_BUILT, isinstance(error, PeerError), rank)
            for rank, (end, error) in enumerate(zip(self.by_rank, self.errors, strict=True))
            if error is not None
        ]
        if not raised:
            return RunError("the engine failed on another of its workers, which says why")
        cause = self.errors[min(raised)[-1]]
        assert cause is not None
        return cause


class EngineWorkers:
    """The workers of one engine, each of which has started the process of one rank. All of them
    must call each method alike; an engine of one rank has one worker, which waits for nobody.
    """

    def __init__(self, role: Rank, size: int) -> None:
        """``size`` neighbours of ``role`` form an engine; all ranks of the role must call.

        ConfigError when ``size`` does not divide the role's ranks.
        """
        self._ranks = EngineRanks(role, size)
        self._starts = 0
        self.size = size
        self._address = ("", 0)
        self._store: Any = None
        """The store by which processes meet; None for one rank."""
        if size > 1:
            self._share_store()

    def next_meeting(self) -> Meeting | None:
        """Return where the next process meets the others; None for an engine of one rank."""
        if self.size == 1:
            return None
        self._starts += 1
        host, port = self._address
        return Meeting(
            rank=self._ranks.rank,
            size=self.size,
            host=self._ranks.host,
            store_host=host,
            store_port=port,
            start=self._starts,
            timeout=self._ranks.timeout.total_seconds(),
        )

    def agree(
        self,
        outcome: CallEnd,
        *,
        delivered: bool,
        version: int,
        error: Exception | None = None,
        check: Callable[[], None] | None = None,
    ) -> CallEnds:
        """Return how a call has ended on all ranks; ``version`` is that of this worker's weights,
        ``error`` what the call has raised here. ``check`` is called now and then while ranks are
        waited for: what it raises ends the wait. RuntimeError where a worker is gone.
        """
        described = None
        if error is not None:
            described = describe_error(error)
        message = msgpack.packb([outcome, delivered, version, described])
        messages = self._ranks.gather(message, check)
        ends = [_read_end(each, rank, self.size) for rank, each in enumerate(messages)]
        errors = [raised for *_, raised in ends]
        errors[self._ranks.rank] = error
        return CallEnds(
            by_rank=[end for end, *_ in ends],
            errors=errors,
            delivered=any(delivers for _, delivers, *_ in ends),
            version=max(newest for _, _, newest, _ in ends),
        )

    def note_end(self) -> None:
        """Say that this worker's latest process is gone."""
        if self._store is not None:
            self._store.set(self._end_of_latest, "")

    def check(self) -> None:
        """Raise AnotherRankEndedError where a process that has met this worker's latest one is
        gone.
        """
        if self._store is not None and self._store.check([self._end_of_latest]):
            raise AnotherRankEndedError

    @property
    def _end_of_latest(self) -> str:
        """Key that is in the store when a process of the latest start is gone."""
        return f"end of start {self._starts}"

    def _share_store(self) -> None:
        """Host the store on the first rank, and open it on the others."""
        seconds = self._ranks.timeout.total_seconds()
        own = b""
        if self._ranks.rank == 0:
            host = self._ranks.host
            self._store, port = host_store(host, seconds)
            own = msgpack.packb([host, port])
        host, port = msgpack.unpackb(self._ranks.gather(own)[0])
        self._address = (host, port)
        if self._ranks.rank > 0:
            self._store = join_store(host, port, seconds)


def _read_end(message: bytes, rank: int, size: int) -> tuple[CallEnd, bool, int, Exception | None]:
    """Return how a call has ended on a rank, whether it delivered rows, the version of the weights
    there, and what the call has raised. PeerError for any other message.
    """
    try:
        match msgpack.unpackb(message):
            case [int(end), bool(delivered), int(version), None]:
                return CallEnd(end), delivered, version, None
            case [int(end), bool(delivered), int(version), [str(name), str(text)]]:
                error = read_error([name, f"rank {rank} of {size}: {text}"])
                return CallEnd(end), delivered, version, error
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(
            f"rank {rank} of the engine sent {message[:40]!r}: expected how its call has ended: "
            f"{error}"
        ) from error
    raise PeerError(
        f"rank {rank} of the engine sent {message[:40]!r}: expected how its call has ended"
    )
