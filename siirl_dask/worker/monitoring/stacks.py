"""The Python stacks of this process's threads, as a bounded text, for the message about a node
that hangs.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

_MAX_FRAMES = 12  # of a thread, the innermost ones
_MAX_THREADS = 3  # besides the task's own
_MAX_LINE = 160  # characters
_IDLE = (
    "threading.py",
    "selectors.py",
    "queue.py",
    "thread.py",
    "socket.py",
    "connection.py",
    "profile.py",
)


def stacks(first: int | None) -> list[str]:
    """Return lines with the stack of the thread ``first``, and of some others that are not idle;
    innermost last.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [
        number
        for number, frame in frames.items()
        if number not in (first, threading.get_ident())
        and not frame.f_code.co_filename.endswith(_IDLE)
    ]
    lines: list[str] = []
    for number in (first, *others[:_MAX_THREADS]):
        if number in frames:
            lines += _stack(frames[number], names.get(number, "a thread of a library"))
    return lines


def _stack(frame: FrameType, name: str) -> Iterator[str]:
    entries = traceback.extract_stack(frame)
    yield f"thread {name}"[:_MAX_LINE]
    if len(entries) > _MAX_FRAMES:
        yield f"  [... {len(entries) - _MAX_FRAMES} frames ...]"
    for entry in entries[-_MAX_FRAMES:]:
        yield f"  {entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}"[:_MAX_LINE]
