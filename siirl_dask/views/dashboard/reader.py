"""Reads run folders for the page in threads of their own, so that no store, however slow, holds
the scheduler up.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from siirl_dask.errors import SiirlError

T = TypeVar("T")
_MOST = 32  # answers that are held
_THREADS = 3
_LAST_SECONDS = 5.0
_SLOW = 3.0  # seconds of reading after which the page says so


@dataclass(slots=True)
class Held(Generic[T]):
    """An answer: it holds the newest reading, and how that went."""

    value: T | None = None
    error: str = ""
    """The error of the last reading; empty where there was none."""
    version: int = 0
    """Grows with each reading."""
    read_at: float = float("-inf")
    """When it was read last, or begun to be: seconds of the monotonic clock."""
    reading: bool = False
    tag: Hashable = None
    """The tag with which it was read."""
    pause: float = 0.0
    """Seconds after which it is read again."""

    @property
    def remark(self) -> str:
        """A sentence on why there is nothing new; empty where all is well."""
        if self.error:
            return self.error
        waited = time.monotonic() - self.read_at
        if self.reading and waited > _SLOW:
            return f"the run's folder has not answered for {waited:.0f} s"
        return ""


class Reader:
    """Answers at once with what is known, and reads again what is older than it may be. Nobody
    asks, nothing is read.

    Its methods belong to the scheduler's thread.
    """

    def __init__(self, most: int = _MOST) -> None:
        """``most`` is the number of answers that are held: those that all viewers ask for, or each
        is read again at every look.
        """
        self._most = most
        self._held: OrderedDict[Hashable, Held[Any]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def get(
        self,
        key: Hashable,
        read: Callable[[], T],
        tag: Hashable = None,
        *,
        soon: float = 1.0,
        seldom: float = 20.0,
    ) -> Held[T]:
        """Return what is known under ``key``, and have ``read`` get it again, in a thread, from time
        to time.

        That is ``soon`` seconds after it was read when ``tag`` has changed since, and otherwise
        less and less often, up to every ``seldom`` seconds.
        """
        held: Held[T] = self._held.setdefault(key, Held())
        self._held.move_to_end(key)
        if tag != held.tag:
            held.pause = soon
        busy = sum(one.reading for one in self._held.values())
        if (
            not (held.reading or self._closed)
            and busy < _THREADS
            and time.monotonic() - held.read_at >= held.pause
        ):
            held.reading = True
            held.read_at = time.monotonic()
            held.tag = tag
            held.pause = min(seldom, max(soon, 2 * held.pause))
            # a daemon: a store that never answers must not keep the process from ending
            thread = threading.Thread(
                target=_fill,
                args=(held, read),
                name="siirl-page",
                daemon=True,
            )
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()
        self._forget_old()
        return held

    def _forget_old(self) -> None:
        """Drop the answers that were asked for the longest time ago."""
        old = [key for key, one in self._held.items() if not one.reading]
        for key in old[: max(0, len(self._held) - self._most)]:
            del self._held[key]

    def close(self) -> None:
        """Read nothing more, and wait some seconds for what is being read: a process that ends
        meanwhile would abort, since threads that it cuts off in a library's own code cannot be
        unwound.
        """
        self._closed = True
        deadline = time.monotonic() + _LAST_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def known(self, key: Hashable) -> Held[Any]:
        """Return what is known under ``key``; nothing is read."""
        return self._held.get(key, Held())


def _fill(held: Held[T], read: Callable[[], T]) -> None:
    try:
        held.value = read()
        held.error = ""
    except SiirlError as error:
        held.error = str(error)[:500]
    except Exception as error:  # each store has errors of its own; the page says them
        held.error = f"{type(error).__name__}: {error}"[:500]
    finally:
        held.version += 1
        held.reading = False
