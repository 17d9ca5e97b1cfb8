"""Broadcasts tensors from one worker's device to others', as flat buffers, never through a table.

All sides cut the announced tensors into the same buffers, of at most ``max_bytes`` or one tensor.
The sender fills a buffer while the one before is on its way; receivers load one while the next
arrives. So a device holds at most two, and a buffer is freed as soon as nobody refers to a tensor
in it. Waits are short slices: a worker that is told to stop does so, even if a peer is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.context import Device
from siirl_dask.errors import NodeError, PeerError
from siirl_dask.planner import Plan, Stream
from siirl_dask.schema import PARAMETER_DTYPE, PARAMETER_SHAPE
from siirl_dask.worker.groups import process_groups as groups
from siirl_dask.worker.peers.data_plane import DataSettings
from siirl_dask.worker.stop import StopFlag

Waiting = Callable[[], AbstractContextManager[None]]
"""Makes a context manager that times a wait for peers."""
_ALIGNED = 16  # bytes: a view needs the alignment of its type, and kernels read this much at once
# seconds between two polls of a broadcast: a bucket over NVLink takes about 1 ms
_SHORTEST_PAUSE = 1e-4
_LONGEST_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """The part of a buffer that holds one tensor."""

    start: int
    """Offset of the first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Offset after the last byte."""
        return self.start + prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of ``buffer``."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


Slots = tuple[BufferSlot, ...]
"""The slots of one buffer, which follow one another."""


def cut(index: pa.Table, max_bytes: int) -> Iterator[Slots]:
    """Yield the slots of each buffer, for the tensors in the order of ``index``. PeerError for a
    bad dtype or shape.
    """
    slots: list[BufferSlot] = []
    for dtype, shape in zip(
        index[PARAMETER_DTYPE].to_pylist(), index[PARAMETER_SHAPE].to_pylist(), strict=True
    ):
        slot = _slot(slots[-1].stop if slots else 0, dtype, shape)
        if slots and slot.stop > max_bytes:
            yield tuple(slots)
            slots = []
            slot = _slot(0, dtype, shape)
        slots.append(slot)
    if slots:
        yield tuple(slots)


def _slot(after: int, dtype: Any, shape: Any) -> BufferSlot:
    """Return the first aligned slot from the offset ``after`` on."""
    torch_dtype = getattr(torch, str(dtype), None)
    if (
        not isinstance(torch_dtype, torch.dtype)
        or shape is None
        or any(size is None or size < 0 for size in shape)
    ):
        raise PeerError(
            f"a tensor of dtype {dtype!r} and shape {shape} was announced: expected those of a "
            "tensor"
        )
    start = after + -after % _ALIGNED
    return BufferSlot(start, torch_dtype, tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Sends tensors from the first of ``members`` to the others."""

    members: tuple[str, ...]
    group: Any
    """Process group of the members, in their order; None on any other worker."""
    device: str
    """Device of this worker, by torch's name."""
    stop: StopFlag
    max_bytes: int
    """Largest buffer, unless one tensor is larger."""

    def send(self, index: pa.Table, tensors: Iterator[Tensor], waiting: Waiting) -> int:
        """Send ``tensors``, which ``index`` describes, and return the bytes of the buffers sent.

        A worker outside the group makes all tensors and sends 0 bytes: they may be gathered from
        all workers of the role. NodeError when the tensors are not the announced ones.
        """
        if self.group is None:
            for _ in tensors:
                self.stop.check()
            return 0
        sent = 0
        work = None
        for slots in cut(index, self.max_bytes):
            buffer = self._filled(slots, tensors)
            with waiting():
                self._finish(work)
            work = self._begin(buffer)
            sent += len(buffer)
        with waiting():
            self._finish(work)
        if next(tensors, None) is not None:
            raise NodeError(
                f"worker {self.members[0]!r} announced {index.num_rows} tensors, and its node gave "
                "more"
            )
        return sent

    def receive(self, index: pa.Table, waiting: Waiting) -> Generator[Tensor]:
        """Yield the tensors that ``index`` describes, one after the other. PeerError when they
        do not arrive.
        """
        buffers = cut(index, self.max_bytes)
        receiving = self._receive_next(buffers)
        while receiving is not None:
            slots, buffer, work = receiving
            with waiting():
                self._finish(work)
            del work  # it refers to the buffer
            receiving = None
            for number, slot in enumerate(slots):
                yield slot.view(buffer)
                if number == 0:  # by now nobody refers to the previous buffer
                    receiving = self._receive_next(buffers)
            del buffer

    def _filled(self, slots: Slots, tensors: Iterator[Tensor]) -> Tensor:
        buffer = torch.empty(slots[-1].stop, dtype=torch.uint8, device=self.device)
        for slot in slots:
            tensor = next(tensors, None)
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (slot.dtype, slot.shape):
                made = "none" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
                announced = f"{slot.dtype} of shape {list(slot.shape)}"
                raise NodeError(
                    f"worker {self.members[0]!r} announced a tensor, {announced}, and its node "
                    f"gave {made}"
                )
            slot.view(buffer).copy_(tensor.detach())
            del tensor  # it may be gathered: only one at a time fits
        return buffer

    def _receive_next(self, buffers: Iterator[Slots]) -> tuple[Slots, Tensor, Any] | None:
        """Begin to receive the next buffer; None after the last."""
        slots = next(buffers, None)
        if slots is None:
            return None
        buffer = torch.empty(slots[-1].stop, dtype=torch.uint8, device=self.device)
        return slots, buffer, self._begin(buffer)

    def _begin(self, buffer: Tensor) -> Any:
        return self.group.broadcast(buffer, 0) if len(buffer) else None

    def _finish(self, work: Any) -> None:
        pause = _SHORTEST_PAUSE
        try:
            while work is not None and not work.is_completed():
                self.stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            if work is not None:
                work.wait()
        except RuntimeError as error:  # torch raises it for a dead peer and at the group's timeout
            self.stop.check()
            raise PeerError(
                f"the broadcast from worker {self.members[0]!r} to {self.members[1:]}: {error}"
            ) from error


def join_broadcasts(
    worker: str,
    plan: Plan,
    devices: Mapping[str, Device],
    data: DataSettings,
    timeout: float,
    stop: StopFlag,
) -> dict[tuple[str, ...], Broadcast]:
    """Make the plan's broadcasts, by the workers that take part; every worker makes all, in the
    same order.

    ``timeout`` is the seconds that a broadcast waits for its peers.
    """
    broadcasts: dict[tuple[str, ...], Broadcast] = {}
    links = (link for chain in plan.chains.values() for link in chain.flat)
    for link in links:
        if (
            not isinstance(link, Stream)
            or not link.joins
            or link.joins in broadcasts
            or link.edge is None
        ):
            continue
        members = (*link.edge.sources, *link.joins[1:])
        if groups.uses_broadcast(data.weight_sync, [devices[member] for member in members]):
            broadcasts[link.joins] = Broadcast(
                members=link.joins,
                group=groups.broadcast_group(worker, devices, link.joins, timeout),
                device=devices[worker].torch_name,
                stop=stop,
                max_bytes=data.stream_bytes,
            )
    return broadcasts
