"""The Python stacks of this process's threads, as a bounded text, for the message about a node that hangs."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

_FRAMES = 12  # innermost ones of a thread
_THREADS = 3  # beside the task's own
_LINE = 160  # characters
_IDLE = ("threading.py", "selectors.py", "queue.py", "thread.py", "socket.py", "connection.py", "profile.py")


def stacks(first: int | None) -> list[str]:
    """Return lines with the stack of the thread ``first``, and of some others that are not idle; innermost last."""
    frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
    others = [number for number in frames if number not in (first, threading.get_ident()) and _busy(frames[number])]
    chosen = [number for number in (first, *others[:_THREADS]) if number in frames]
    return [line for number in chosen for line in _stack(frames[number], names.get(number, "a thread of a library"))]


def _stack(frame: FrameType, name: str) -> Iterator[str]:
    entries = traceback.extract_stack(frame)
    yield f"thread {name}"[:_LINE]
    if len(entries) > _FRAMES:
        yield f"  [... {len(entries) - _FRAMES} frames ...]"
    for entry in entries[-_FRAMES:]:
        yield f"  {entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}"[:_LINE]


def _busy(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.endswith(_IDLE)
