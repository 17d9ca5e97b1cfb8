"""Tensors from the device of one worker to those of others, by broadcasts of flat buffers, never through a table.

Both sides cut what is announced into the same buffers, of ``most`` bytes or one tensor. The giver fills one while the
one before it is on its way, the takers load one while the next comes: a device has two at most, and each is let go of
as soon as nobody refers to a tensor in it. Waits are slices: a worker that is told to stop does, though a peer is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.errors import NodeError, PeerError
from siirl_dask.schema import PARAMETER_DTYPE, PARAMETER_SHAPE
from siirl_dask.worker.stop import StopFlag

Waiting = Callable[[], AbstractContextManager[None]]
"""Within which it waits for peers."""
_ALIGNED = 16  # bytes: a view needs its type's own, and kernels read this much at once
_SHORTEST, _LONGEST = 1e-4, 0.02  # seconds between two looks: a bucket over NVLink takes about 1 ms


@dataclass(frozen=True, slots=True)
class Place:
    """Of one tensor in a buffer."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize

    def within(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


def cut(about: pa.Table, most: int) -> Iterator[tuple[Place, ...]]:
    """The tensors that ``about`` tells of, in order, as those of one buffer after the other. PeerError for what is no
    dtype or no shape.
    """
    places: list[Place] = []
    for dtype, shape in zip(about[PARAMETER_DTYPE].to_pylist(), about[PARAMETER_SHAPE].to_pylist(), strict=True):
        place = _place(places[-1].stop if places else 0, dtype, shape)
        if places and place.stop > most:
            yield tuple(places)
            places, place = [], _place(0, dtype, shape)
        places.append(place)
    if places:
        yield tuple(places)


def _place(after: int, dtype: Any, shape: Any) -> Place:
    kind = getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype) or shape is None or any(size is None or size < 0 for size in shape):
        raise PeerError(f"a tensor of dtype {dtype!r} and shape {shape} was announced: expected those of a tensor")
    return Place(after + -after % _ALIGNED, kind, tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """From the first of ``members`` to the others."""

    members: tuple[str, ...]
    group: Any
    """Their process group; None on a worker that is none of them."""
    root: int
    """The giver's rank in it."""
    device: str
    """This worker's, by torch's name."""
    stop: StopFlag
    most: int

    def send(self, about: pa.Table, tensors: Iterator[Tensor], waiting: Waiting) -> int:
        """Bytes of the buffers that were sent; on a worker that sends none, 0. All ``tensors`` are made on any: they
        may be gathered from all. NodeError when they are not those that were announced.
        """
        if self.group is None:
            for _ in tensors:
                self.stop.check()
            return 0
        sent, work = 0, None
        for places in cut(about, self.most):
            buffer = self._filled(places, tensors)
            with waiting():
                self._finish(work)
            work = self._begin(buffer)
            sent += len(buffer)
        with waiting():
            self._finish(work)
        if next(tensors, None) is not None:
            raise NodeError(f"worker {self.members[0]!r} announced {about.num_rows} tensors, and its node gave more")
        return sent

    def receive(self, about: pa.Table, waiting: Waiting) -> Generator[Tensor]:
        """What the giver's ``about`` tells of, one after the other. PeerError when it does not come."""
        cuts = cut(about, self.most)
        coming = self._next(cuts)
        while coming is not None:
            places, buffer, work = coming
            with waiting():
                self._finish(work)
            del work  # which refers to the buffer
            coming = None
            for number, place in enumerate(places):
                yield place.within(buffer)
                if number == 0:  # by now nobody refers to the buffer before this one
                    coming = self._next(cuts)
            del buffer

    def _filled(self, places: tuple[Place, ...], tensors: Iterator[Tensor]) -> Tensor:
        buffer = torch.empty(places[-1].stop, dtype=torch.uint8, device=self.device)
        for place in places:
            tensor = next(tensors, None)
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (place.dtype, place.shape):
                given = "none" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
                told = f"{place.dtype} of shape {list(place.shape)}"
                raise NodeError(f"worker {self.members[0]!r} announced a tensor, {told}, and its node gave {given}")
            place.within(buffer).copy_(tensor.detach())
            del tensor  # it may be gathered: one at a time
        return buffer

    def _next(self, cuts: Iterator[tuple[Place, ...]]) -> tuple[tuple[Place, ...], Tensor, Any] | None:
        places = next(cuts, None)
        if places is None:
            return None
        buffer = torch.empty(places[-1].stop, dtype=torch.uint8, device=self.device)
        return places, buffer, self._begin(buffer)

    def _begin(self, buffer: Tensor) -> Any:
        return self.group.broadcast(buffer, self.root) if len(buffer) else None

    def _finish(self, work: Any) -> None:
        pause = _SHORTEST
        try:
            while work is not None and not work.is_completed():
                self.stop.wait(pause)
                pause = min(2 * pause, _LONGEST)
            if work is not None:
                work.wait()
        except RuntimeError as error:  # torch's, of a peer that is gone or of the group's timeout
            self.stop.check()
            raise PeerError(f"the broadcast from worker {self.members[0]!r} to {self.members[1:]}: {error}") from error
