"""How much memory the movement of rows may take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

MOST_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a databuffer may use, in bytes."""

    memory: int = 2 * 2**30
    """Beyond a worker's own part of an edge and its result: a quarter for partitions that wait to be taken, before they
    spill; an eighth each for chunks being received and being served; half for memory that is kept to be used again.
    """
    chunk: int = 16 * 2**20
    """Of rows, in one message."""
    described: int = 2**20
    """Of the descriptions of all rows of an edge that travel with their statistics; larger ones are asked for."""
    lend_from: int = 2**12
    """Of a row in a column, on average: from here on the targets of replicated rows read them where they lie."""
    spill_folder: str | None = None
    """Where partitions spill to: None is the system's folder for temporary files."""

    def __post_init__(self) -> None:
        if not 0 < self.chunk <= MOST_CHUNK_BYTES:
            raise ValueError(f"chunk={self.chunk}: expected at most {MOST_CHUNK_BYTES}")


@cache
def physical_memory() -> int:
    """Bytes of this machine: no peer makes this process lay out or read more at once."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
