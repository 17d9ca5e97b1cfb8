"""Keeps what was made last, up to a number of bytes: fetched files, decoded pictures, pixels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar, cast

T = TypeVar("T")


class BoundedCache:
    """Values by key; those that were used longest ago go when all would be more than ``max_bytes``.

    Any thread may use it. Two threads that want a missing value both make it, and one is kept.
    """

    def __init__(self, max_bytes: int, beside: BoundedCache | None = None) -> None:
        """Whenever a value is added, ``max_bytes`` are for all here and in the cache ``beside``
        this one.
        """
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._beside = beside
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all values that are kept."""
        return self._nbytes

    def get(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return the value of ``key``; where there is none, ``make`` it, and keep it with the bytes
        that ``size`` says.

        A value of more bytes than all may have is not kept. A key stands for values of one type.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return cast(T, self._values[key][0])
        value = make()
        nbytes = size(value)
        with self._lock:
            room = self._max_bytes - (0 if self._beside is None else self._beside.nbytes)
            if key not in self._values and nbytes <= room:
                self._values[key] = value, nbytes
                self._nbytes += nbytes
                while self._nbytes > room:
                    _, (_, freed) = self._values.popitem(last=False)
                    self._nbytes -= freed
        return value
