"""A run as its folder tells of it, for the page of one viewer."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from siirl_dask.errors import SiirlError
from siirl_dask.runs.reader import Run
from siirl_dask.runs.samples.token_texts import tokenizer_file
from siirl_dask.views.dashboard.reader import Held, Reader
from siirl_dask.views.dashboard.records import thinned
from siirl_dask.views.dashboard.source import Pulses
from siirl_dask.views.dashboard.store import MOST_RECORDS, LiveRun, RunEnding, RunStore
from siirl_dask.views.watch.look import Life, Look, Watcher
from siirl_dask.wording import redacted

_EVERY = 2.0  # seconds between two looks at a run that goes on
_SELDOM = 30.0  # at one that is over: it may be resumed
_MOST = 16  # runs that are watched
_MOST_ANSWERS = 256  # of a dozen for each viewer
_GONE = "gone"
_UNREADABLE = "unreadable"


class Looks:
    """Looks at runs for all viewers together."""

    def __init__(self) -> None:
        self.reader = Reader(_MOST_ANSWERS)
        self._watchers: OrderedDict[str, Watcher] = OrderedDict()
        self._tokenizers: dict[str, str] = {}
        self._lock = threading.Lock()

    def look(self, url: str) -> Look:
        """Return the run as it is now; called in a thread of the reader's."""
        with self._lock:
            watcher = self._watchers.pop(url, None)
        if watcher is None:
            watcher = Watcher(url, tables=False)
            try:
                self._tokenizers[url] = tokenizer_file(Run(url).config.model.path)
            except SiirlError:
                # a run of another version: all but its tokens' texts can be shown
                self._tokenizers[url] = ""
        with self._lock:
            self._watchers[url] = watcher
            while len(self._watchers) > _MOST:
                old, _ = self._watchers.popitem(last=False)
                self._tokenizers.pop(old, None)
        return watcher.look(time.monotonic())

    def tokenizer(self, url: str) -> str:
        """Return the path of the ``tokenizer.json`` of a run's model; empty where it is not here,
        or nobody has looked yet.
        """
        return self._tokenizers.get(url, "")


class FolderSource:
    """Knows of one run what its folder has; it needs no scheduler and none of its workers."""

    is_served = True

    def __init__(self, looks: Looks, url: str, name: str) -> None:
        self._looks = looks
        self._run = LiveRun(url, name=name)
        self._version = 0
        self._life = Life.UNKNOWN
        self.store = RunStore(looks.reader)
        self.store.runs[url] = self._run

    def refresh(self) -> None:
        """Take what the last look at the folder has found, and have another one if it is due."""
        url = self._run.url
        pause = _EVERY
        if self._life.is_over:
            pause = _SELDOM
        held: Held[Look] = self._looks.reader.get(
            ("look", url), lambda: self._looks.look(url), soon=_EVERY, seldom=pause
        )
        if held.version == self._version:
            return
        self._version = held.version
        if held.value is not None:
            self._take(held.value)
        elif held.error:
            self._run.ended = RunEnding(status=_UNREADABLE, error=redacted(held.error))
            self._run.version += 1

    def _take(self, look: Look) -> None:
        run = self._run
        run.name = look.name
        run.steps = 0 if look.total is None else look.total
        run.tokenizer = self._looks.tokenizer(run.url)
        run.records = thinned(look.records, MOST_RECORDS)
        run.seconds = sum(record["seconds"] for record in look.records)
        run.ended = _ending(look)
        run.version += 1
        self._life = look.life

    def goes_on(self, run: LiveRun) -> bool:
        """Return whether the run gives signs of life."""
        return self._life is Life.UNDER_WAY

    def pulse_seconds(self) -> float:
        """Return any time: no heartbeat comes here."""
        return _EVERY

    def pulses(self, run: LiveRun) -> Pulses:
        """Return nothing: heartbeats go to the scheduler of the run alone."""
        return Pulses()


def _ending(look: Look) -> RunEnding | None:
    if look.life is Life.ENDED and look.summary is not None:
        return RunEnding.of(look.summary)
    if look.life is Life.GONE:
        error = "its process was killed, or is cut off from its store"
        return RunEnding(status=_GONE, error=error, steps=look.done)
    return None
