"""The width of what a command prints."""

from __future__ import annotations

import shutil
import sys


def output_columns() -> int:
    """Return the columns of the terminal that shows standard output; no bound for a pipe or a
    file.
    """
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return sys.maxsize
