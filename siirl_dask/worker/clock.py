"""A worker's monotonic clock against the scheduler's wall clock, by the round trips of Dask's heartbeats.

Processes for which ``clock_id`` is the same read the same clock. Others are aligned by their offsets: Dask compares the
clocks at each heartbeat, taking the answer to come from the middle of the round trip.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from functools import cache
from pathlib import Path

_SAMPLES = 31  # heartbeats whose median counts: one that was delayed on one of its two ways says little


@cache
def clock_id() -> str:
    """Return a name of the clock that ``time.monotonic_ns`` reads: that of this boot, and of its namespace of time."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:  # no Linux, or none that tells
        return f"process {os.getpid()} {time.time_ns()}"


class ClockOffset:
    """Estimates nanoseconds to be added to this worker's monotonic clock for the scheduler's wall clock."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque([_wall()], maxlen=_SAMPLES)

    def note(self, delay: float) -> None:
        """Take a sample: the scheduler's clock is ``delay`` seconds ahead of this host's."""
        self._samples.append(_wall() + round(delay * 1e9))

    @property
    def nanoseconds(self) -> int:
        """The estimate."""
        return round(statistics.median_low([*self._samples]))


def _wall() -> int:
    """Return the nanoseconds by which this host's wall clock is ahead of its monotonic clock."""
    return time.time_ns() - time.monotonic_ns()
