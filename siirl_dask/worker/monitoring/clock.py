"""A worker's monotonic clock against the scheduler's wall clock, by the round trips of Dask's
heartbeats.

Processes for which ``clock_id`` is the same read the same clock. Others are aligned by their
offsets: Dask compares the clocks at each heartbeat, as if the answer were sent in the middle of the
round trip.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from functools import cache
from pathlib import Path

# heartbeats whose median counts: a heartbeat that was delayed in one direction is wrong
_SAMPLES = 31


@cache
def clock_id() -> str:
    """Return a name of the clock that ``time.monotonic_ns`` reads: the ids of this boot and of
    its time namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/time")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:  # no Linux, or no namespaces of time
        return f"process {os.getpid()} {time.time_ns()}"


class ClockOffset:
    """Estimates nanoseconds to be added to this worker's monotonic clock for the scheduler's
    wall clock.
    """

    def __init__(self) -> None:
        self._samples: deque[int] = deque([_wall()], maxlen=_SAMPLES)

    def add_sample(self, delay: float) -> None:
        """Add a measurement: the scheduler's clock is ``delay`` seconds ahead of this host's."""
        self._samples.append(_wall() + round(delay * 1e9))

    @property
    def nanoseconds(self) -> int:
        """The estimate."""
        return round(statistics.median_low(list(self._samples)))


def _wall() -> int:
    """Return the nanoseconds by which this host's wall clock is ahead of its monotonic clock."""
    return time.time_ns() - time.monotonic_ns()
