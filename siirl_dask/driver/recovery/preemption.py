"""Lets a run that gets SIGTERM, as from a machine that is taken away, or whose caller cancels it,
write a last checkpoint before it ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

from siirl_dask.errors import SiirlError
from siirl_dask.planner import Iteration, Phase


class Preempted(KeyboardInterrupt):
    """The run has ended on SIGTERM, or on its caller's request: with its pending iterations and a
    checkpoint done, or without where that failed.
    """


class Preemption:
    """Handles SIGTERM while inside: the first gives the run ``grace`` seconds, a second or their
    end stops it. A ``stop`` that another thread sets ends it in the same way, at any time.
    """

    def __init__(
        self,
        grace: float,
        note: Callable[[str], None],
        stop: threading.Event | None = None,
        *,
        saves: bool = True,
    ) -> None:
        """With 0 seconds of ``grace``, or outside the main thread, SIGTERM acts as before. A run
        that ``saves`` writes a checkpoint of its last step.
        """
        self._stop = threading.Event() if stop is None else stop
        self._saves = saves
        self._grace = grace
        self._note = note
        self._is_signalled = False
        self._before: object = None
        self._timer: threading.Timer | None = None

    @property
    def requested(self) -> bool:
        """Whether SIGTERM has come, or the caller wants the run to end."""
        return self._stop.is_set()

    def __enter__(self) -> Preemption:
        if not self._grace or threading.current_thread() is not threading.main_thread():
            return self
        before = signal.getsignal(signal.SIGTERM)
        if before is not signal.SIG_IGN:
            self._before = before
            signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: object,
    ) -> None:
        """Raise Preempted for a failure after SIGTERM: the machine goes, so the run is not
        launched again. A caller who wants the run to end gets the failure itself.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]  # what getsignal gave
        if self._is_signalled and isinstance(error, SiirlError):
            raise Preempted(f"; what was under way failed: {error}") from error

    def cut(self, iterations: Iterator[Iteration]) -> Iterator[Iteration]:
        """Yield the iterations; after a request to end one step more, which drains the pipeline,
        and its checkpoint. None come where the request was there before the first.
        """
        has_begun = False
        for iteration in iterations:
            if not self.requested:
                has_begun = True
                yield iteration
                continue
            if not has_begun:
                return
            match iteration.phase.counts_as:
                case Phase.CHECKPOINT:
                    yield iteration
                case Phase.TRAIN:
                    yield replace(iteration, drain=True)
                    if self._saves:
                        yield Iteration(Phase.CHECKPOINT, iteration.step, iteration.sequence + 1)
                case Phase.VALIDATION if iteration.step and self._saves:
                    yield Iteration(Phase.CHECKPOINT, iteration.step, iteration.sequence)
            return

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            if callable(self._before):
                self._before(signum, frame)
            raise KeyboardInterrupt
        self._is_signalled = True
        self._stop.set()
        self._note(
            f"SIGTERM: what is under way and a checkpoint have {self._grace:g} s (run.grace)"
        )
        self._timer = threading.Timer(self._grace, signal.raise_signal, [signal.SIGTERM])
        self._timer.daemon = True
        self._timer.start()
