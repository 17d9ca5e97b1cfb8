"""Decides whether a run that has failed is launched again, reports that, and counts what it
costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from siirl_dask.driver.failures import may_pass
from siirl_dask.errors import Fenced, Interrupted, SiirlError, WorkerLeft, WorkersJoined
from siirl_dask.observe import Restart

# seconds before the second restart in a row; each further pause is twice as long
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0  # seconds


@dataclass(slots=True)
class Restarts:
    """Counts the restarts of one start of a run: how often it is launched again by itself."""

    limit: int
    """``run.max_restarts``."""
    note: Callable[[str], None]
    """Shows a line to the user."""
    announce: Callable[[SiirlError], None]
    """Shows the error that ends the run."""
    elastic: bool = False
    """Whether workers may come and go: a worker that left in order is then no failure."""
    done: list[Restart] = field(default_factory=list)
    """The restarts after which all workers worked again."""
    _in_a_row: int = 0
    """Restarts since the last new step."""
    _most_steps: int = -1
    """Highest number of completed steps at any failure."""
    _first_failure: SiirlError | None = None
    """The first failure since the last new step: it is the cause of those that follow."""
    _decided: BaseException | None = None
    """The last failure that was decided on."""
    _decision: bool = False
    """Whether the run is launched again after that failure."""
    _current: Restart | None = None
    """The restart that is in progress."""
    _failed_at: float = 0.0

    def after(self, failure: SiirlError, steps: int) -> bool:
        """Return whether the run is launched again after a failure.

        The first call for a failure shows the decision to the user. ``steps`` are done in all.
        """
        if self._decided is not failure:
            self._decision = self._decide(failure, steps)
            self._decided = failure
        return self._decision

    def cause(self, failure: SiirlError) -> SiirlError:
        """Return the error that the run ends with: the first of the failures in a row without a new
        step in between.

        What a node raises once all workers worked again is not one of them.
        """
        first = self._first_failure
        if first is None or first is failure or isinstance(failure, (Fenced, Interrupted)):
            return failure
        if self._current is None and not may_pass(failure):
            return failure
        times = "once more"
        if self._in_a_row != 1:
            times = f"{self._in_a_row} times more"
        note = (
            f"it was tried {times} without a new step (run.max_restarts={self.limit}); the last "
            f"time: {failure}"
        )
        if note not in getattr(first, "__notes__", ()):
            first.add_note(note)
        return first

    def pause(self, failure: SiirlError) -> None:
        """Wait before the next launch after a ``failure``, unless it is the first in a row or a
        change of workers.
        """
        if self._in_a_row > 1 and not self._is_change(failure):
            time.sleep(min(_FIRST_PAUSE * 2 ** (self._in_a_row - 2), _LONGEST_PAUSE))

    def resumed(self, resumed_at: int, workers: int, reused: int) -> None:
        """Record that all ``workers`` work again after step ``resumed_at``; ``reused`` of them
        with their old roles.
        """
        if self._current is None:
            return
        seconds = time.monotonic() - self._failed_at
        steps_again = max(0, self._current.steps - resumed_at)
        self.done.append(
            replace(self._current, seconds=seconds, steps_again=steps_again, workers=workers)
        )
        self._current = None
        self.note(
            f"at work again after {seconds:.1f} s: {reused} of {workers} workers kept what they "
            f"had built, steps to do again: {steps_again}"
        )

    def _decide(self, failure: SiirlError, steps: int) -> bool:
        if self._is_change(failure):
            self._begin(failure, steps)
            self.note(str(failure))
            return True
        if steps > self._most_steps:
            self._in_a_row = 0
            self._most_steps = steps
            self._first_failure = None
        if self._first_failure is None:
            self._first_failure = failure
        if self._in_a_row >= self.limit or not may_pass(failure):
            self.announce(self.cause(failure))
            return False
        self._in_a_row += 1
        self._begin(failure, steps)
        silence = getattr(failure, "silence", None)
        after = ""
        if silence is not None:
            after = f", noticed {silence:.1f} s after its last sign of life"
        if failure.report:
            self.note(failure.report)
        self.note(f"restart {self._in_a_row} of {self.limit} (run.max_restarts){after}: {failure}")
        return True

    def _is_change(self, failure: SiirlError) -> bool:
        """Return whether workers have only come or gone, which an elastic run does not count as
        a failure.
        """
        if not self.elastic:
            return False
        return isinstance(failure, (WorkerLeft, WorkersJoined))

    def _begin(self, failure: SiirlError, steps: int) -> None:
        """Begin to count what a restart costs, unless one is in progress."""
        if self._current is not None:
            return
        since = getattr(failure, "since", None)
        self._failed_at = time.monotonic() if since is None else since
        self._current = Restart(
            cause=str(failure),
            steps=steps,
            silence=getattr(failure, "silence", None),
        )
