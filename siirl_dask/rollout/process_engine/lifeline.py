"""Ties a process to the one that started it: it ends with all that it has started, and its folder of
temporary files is removed, however either of them ends.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
from contextlib import suppress

_STANDARD_INPUT = 0


def end_with_parent(folder: str, *files: int) -> None:
    """End this process and its group when its parent ends, or standard input, whose other end the
    parent has; then, and when this process ends by itself, remove ``folder``.

    ``files`` are descriptors that nothing but this process is to hold open. Call it first: it forks
    on Linux.
    """
    try:
        watched = os.pidfd_open(os.getpid())
        parent = os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # another system, or a kernel without them
        threading.Thread(target=_follow, args=(folder,), daemon=True).start()
        return
    child = os.fork()
    if child:
        os.close(watched)
        os.close(parent)
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)  # the process that watches is no child of this one, which may wait for its own
    for file in files:
        os.close(file)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        os.dup2(nowhere, output)  # else the parent would not see the end of this process's output
    # what the parent has forked, as pools of processes, may have the other end of standard input too
    select.select([_STANDARD_INPUT, watched, parent], [], [])
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(watched, signal.SIGKILL)
    select.select([watched], [], [])
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _follow(folder: str) -> None:
    while os.read(_STANDARD_INPUT, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
