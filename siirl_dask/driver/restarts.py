"""Decides whether a run that has failed is tried again, says so, and counts what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from siirl_dask.driver.failures import may_pass
from siirl_dask.errors import Fenced, Interrupted, SiirlError, WorkerLeft, WorkersJoined
from siirl_dask.observe import Restart

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before the second try in a row, which double, and at most


@dataclass(slots=True)
class Restarts:
    """Counts the tries of one start of a run."""

    limit: int
    """``run.max_restarts``."""
    note: Callable[[str], None]
    """Shows a line to the user."""
    announce: Callable[[SiirlError], None]
    """Shows the error that ends the run."""
    elastic: bool = False
    """Whether workers may come and go: that one left in order is then no failure."""
    done: list[Restart] = field(default_factory=list)
    """The restarts after which the run was at work again."""
    _row: int = 0
    """Restarts since the last new step."""
    _most_steps: int = -1
    """Steps that were done at most, when a try failed."""
    _first: SiirlError | None = None
    """The first failure since the last new step: it is the cause of those that follow."""
    _verdict: tuple[BaseException, bool] | None = None
    """The last failure, and whether the run is tried again after it."""
    _under_way: Restart | None = None
    _failed_at: float = 0.0

    def after(self, failure: SiirlError, steps: int) -> bool:
        """Return whether the run is tried again after a failure, and tell the user; the second time only return it.

        ``steps`` are done in all.
        """
        if self._verdict is None or self._verdict[0] is not failure:
            self._verdict = failure, self._decide(failure, steps)
        return self._verdict[1]

    def cause(self, failure: SiirlError) -> SiirlError:
        """Return the error that the run ends with: of a row of failures without a step in between the first one.

        What a node raises once the run was at work again is not one of them.
        """
        first, at_work = self._first, self._under_way is None
        if first is None or first is failure or isinstance(failure, (Fenced, Interrupted)):
            return failure
        if at_work and not may_pass(failure):
            return failure
        times = "once more" if self._row == 1 else f"{self._row} times more"
        note = f"it was tried {times} without a new step (run.max_restarts={self.limit}); the last time: {failure}"
        if note not in getattr(first, "__notes__", ()):
            first.add_note(note)
        return first

    def pause(self, failure: SiirlError) -> None:
        """Wait before the next try after a ``failure``: not before the first in a row, nor after what is none."""
        if self._row > 1 and not self._is_change(failure):
            time.sleep(min(_FIRST_PAUSE * 2 ** (self._row - 2), _LONGEST_PAUSE))

    def at_work(self, resumed_at: int, workers: int, kept: int) -> None:
        """Note that a try is at work after step ``resumed_at``; ``kept`` of the ``workers`` kept what they had."""
        if self._under_way is None:
            return
        seconds, again = time.monotonic() - self._failed_at, max(0, self._under_way.steps - resumed_at)
        self.done.append(replace(self._under_way, seconds=seconds, steps_again=again, workers=workers))
        self._under_way = None
        self.note(
            f"at work again after {seconds:.1f} s: {kept} of {workers} workers kept what they had built, steps to do "
            f"again: {again}"
        )

    def _decide(self, failure: SiirlError, steps: int) -> bool:
        if self._is_change(failure):
            self._begin(failure, steps)
            self.note(str(failure))
            return True
        if steps > self._most_steps:
            self._row, self._most_steps, self._first = 0, steps, None
        self._first = self._first or failure
        if self._row >= self.limit or not may_pass(failure):
            self.announce(self.cause(failure))
            return False
        self._row += 1
        self._begin(failure, steps)
        silence = getattr(failure, "silence", None)
        after = "" if silence is None else f", noticed {silence:.1f} s after its last sign of life"
        if failure.report:
            self.note(failure.report)
        self.note(f"restart {self._row} of {self.limit} (run.max_restarts){after}: {failure}")
        return True

    def _is_change(self, failure: SiirlError) -> bool:
        """Return whether workers have only come or gone, which an elastic run does not count as a failure."""
        return self.elastic and isinstance(failure, (WorkerLeft, WorkersJoined))

    def _begin(self, failure: SiirlError, steps: int) -> None:
        """Begin to count what a restart costs, unless one is under way."""
        if self._under_way is None:
            self._failed_at = getattr(failure, "since", None) or time.monotonic()
            self._under_way = Restart(cause=str(failure), steps=steps, silence=getattr(failure, "silence", None))
