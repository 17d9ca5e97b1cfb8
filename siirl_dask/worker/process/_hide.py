"""Prepares the process that workers are forked from; it imports this before anything else,
transformers above all.

It hides broken packages, and ends that process at once when nobody needs it any more: freeing all
imported modules would take two seconds, in which a reader of the run's output waits for its end.
"""

import atexit
import os
import sys

from siirl_dask.models.broken_imports import hide


def _end(process: int) -> None:
    if os.getpid() == process:  # a forked worker inherits this function
        # Python itself would do so after this function
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


hide()
atexit.register(_end, os.getpid())  # the first to be registered, and so the last to be called
