"""Measures how much longer a machine takes for what it computes, because of its other work."""

import threading
import time

# seconds of computing: longer than a scheduler's slice hides, short beside the pause
_BURST = 0.003
_PAUSE = 0.1


class Slowdown:
    """A thread that computes now and then, from ``with`` to its end.

    Tests that bound how soon something happens allow ``factor`` times as long: 1 on an idle
    machine, so that the bound is what it says there, and 3 where three processes compete for each
    core.
    """

    def __init__(self):
        self.factor = 1.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join()

    def _measure(self):
        wall = computed = 0.0
        while True:
            began, cpu = time.perf_counter(), time.thread_time()
            while time.thread_time() - cpu < _BURST:
                pass
            wall, computed = wall + time.perf_counter() - began, computed + time.thread_time() - cpu
            self.factor = max(1.0, wall / computed)
            if self._stop.wait(_PAUSE):
                return
