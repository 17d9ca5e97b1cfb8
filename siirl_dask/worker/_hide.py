"""Prepares the process that workers are forked from; it imports this before anything else, transformers above all.

It hides broken packages. And it ends that process at once when nobody needs it any more: to free all that it has
imported takes it two seconds, in which whoever reads a run's output waits for its end.
"""

import atexit
import os

from siirl_dask.models.broken_imports import hide


def _end(process: int) -> None:
    if os.getpid() == process:  # and not one that was forked from it
        os._exit(0)


hide()
atexit.register(_end, os.getpid())  # the first to be registered, and so the last to be called
