"""Ctrl-C ends the process at once, with one line, while nothing is under way.

A KeyboardInterrupt that is raised while modules are imported, or a configuration is read, comes out
of some library as another error, or not at all. This module imports next to nothing: what comes
before it is not answered.
"""

from __future__ import annotations

import os
import signal

STOPPED = "stopped by the user"
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C or SIGTERM has stopped, as shells count it."""


class EndsAtOnce:
    """Context manager that lets Ctrl-C end the process within, where nothing must be tidied up.

    Where Ctrl-C is ignored, as in a script's background jobs, or answered by somebody else, it
    stays so.
    """

    def __enter__(self) -> None:
        self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._replaced:
            signal.signal(signal.SIGINT, _end)

    def __exit__(self, *error: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, frame: object) -> None:
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)
