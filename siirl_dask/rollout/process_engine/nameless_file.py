"""Tensors in a file without a name, whose descriptor goes from process to process: it is gone with
the last process that has it open, however that one ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from siirl_dask.errors import PeerError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in the file; all lie one after the other, each as a file of safetensors."""

    name: str
    shape: tuple[int, ...]
    length: int
    """Bytes."""


class NamelessFile:
    """Tensors in memory where the system has files there, else on the disk of temporary files."""

    def __init__(self) -> None:
        self.descriptor = _open()
        self._entries: list[TensorEntry] = []

    def write(self, tensors: Iterable[tuple[str, Tensor]], progress: Callable[[], None]) -> None:
        """Append tensors, one in memory at a time besides; ``progress`` is called after each."""
        with open(self.descriptor, "ab", closefd=False) as file:
            for name, tensor in tensors:
                packed = save({name: tensor.detach().to("cpu").contiguous()})
                file.write(packed)
                self._entries.append(TensorEntry(name, tuple(tensor.shape), len(packed)))
                progress()

    @property
    def entries(self) -> list[list[Any]]:
        """The tensors of the file as plain data, for ``read_entries``."""
        return [[entry.name, list(entry.shape), entry.length] for entry in self._entries]

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.descriptor)


def read_entries(value: object) -> list[TensorEntry]:
    """Return what ``value`` says of a file. PeerError for anything else."""
    if isinstance(value, list):
        entries = [_entry(one) for one in value]
        if len({entry.name for entry in entries}) == len(entries):
            return entries
    raise PeerError("received a list of tensors that is none, or has one twice")


def read_tensors(descriptor: int, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file, one in memory at a time. PeerError where the file has others."""
    size = os.fstat(descriptor).st_size
    if size != sum(entry.length for entry in entries):
        raise PeerError(f"a file of tensors has {size} bytes: expected another number")
    if not entries:
        return
    with mmap(descriptor, size, access=ACCESS_READ) as whole:
        first = 0
        for entry in entries:
            found = load(whole[first : first + entry.length])
            if found.keys() != {entry.name}:
                raise PeerError(f"a file of tensors has {list(found)}: expected {entry.name!r}")
            first += entry.length
            yield entry.name, found[entry.name]


def _entry(value: object) -> TensorEntry:
    match value:
        case [str(name), list(shape), int(length)] if length > 0:
            if all(isinstance(size, int) and size >= 0 for size in shape):
                return TensorEntry(name, tuple(shape), length)
    raise PeerError(f"received {value!r:.200}, which describes no tensor")


def _open() -> int:
    """Return the descriptor of a new file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("siirl-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
