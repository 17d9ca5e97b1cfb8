"""The queue from which an engine takes the turns of many episodes, as soon as their environments have answered.

An engine asks for turns whenever it has room. Episodes whose environment has not answered do not hold it up, since more
episodes are open than the engine has rows; there is no barrier, neither after a turn nor after an episode.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from siirl_dask.context import Device
from siirl_dask.environments import Answer, Failure, Opening, Session
from siirl_dask.nodes.episode import Episode
from siirl_dask.nodes.episode_rows import Item
from siirl_dask.nodes.episode_texts import Unusable
from siirl_dask.nodes.failures import GIVEN_UP
from siirl_dask.rollout import Generation, GenerationRequest

_SLICE = 0.1  # seconds within which a wait for environments notices that the worker is to stop
_OPEN_PER_ROW = 8  # half as many take a fifth longer where one call in 20 is slow (docs/benchmarks/turns.md)
_ENOUGH = 0.5  # share of the open episodes for which an engine that runs whole batches waits

Heard = tuple[int, Answer, float]
"""An episode's number, its environment's answer, and the time of the answer."""


@dataclass(slots=True)
class Usage:
    """Counts of a worker while it plays."""

    environment_seconds: list[float] = field(default_factory=list)
    """Seconds of each call of an environment, until its answer."""
    most_open: int = 0
    """Most episodes that were open at once."""
    row_seconds: float = 0.0
    """Time of each of the engine's rows that was filled, summed."""
    seconds: float = 0.0

    def filled(self, rows: int) -> float:
        """Return the share of ``rows`` rows that was filled on average."""
        return self.row_seconds / (rows * self.seconds) if rows and self.seconds else 0.0


@dataclass(slots=True)
class OpenEpisode:
    """An episode whose environment is open."""

    ticket: Any
    """Names the episode to the source that it came from."""
    episode: Episode
    key: int
    """Its number in the session."""
    asked: float = 0.0
    """Time at which its environment was last called."""


@dataclass(slots=True)
class EpisodeQueue:
    """A RequestQueue whose requests are the next turns of episodes. Used from the thread of the node alone."""

    source: Any
    """Episodes to be played: a queue with ``next(limit, wait=)`` and ``complete(ticket, played)``."""
    own: int
    """Number of episodes that the source began with; more come from peers."""
    make: Callable[[Item], tuple[Episode, dict[str, Any], int]]
    """Returns an episode, and the row and the seed that its environment is reset with."""
    session: Session
    answers: SimpleQueue[Heard]
    device: Device
    check_stop: Callable[[], None]
    max_failures: int
    max_open: int | None = None
    """Most episodes that are open at once; None: eight times the engine's rows."""
    first_key: int = 0
    """Added to an episode's number for its number in the session, which may hold those of earlier steps."""
    usage: Usage = field(default_factory=Usage)
    rows: int = 0
    """Rows of the engine: the most turns that it has asked for."""
    put_aside: list[OpenEpisode] = field(default_factory=list)
    """Episodes that have spent this step's budget, with their environments open."""
    _open: dict[int, OpenEpisode] = field(default_factory=dict)
    _ready: deque[OpenEpisode] = field(default_factory=deque)
    _begun: int = 0
    _failed: int = 0
    _under_way: int = 0
    _latest: float = field(default_factory=time.monotonic)
    _given: float = field(default_factory=time.monotonic)
    """Time at which the engine got its latest turns."""

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[OpenEpisode, GenerationRequest]]:
        """Return up to ``limit`` turns that are ready; with ``wait`` none only when all episodes have ended.

        With ``wait`` the engine has nothing under way. It gets no turn alone while others come soon: it waits for half
        of the open episodes, though no longer than its last batch took, so that a wait never costs more than that.
        """
        self.rows = max(self.rows, limit)
        began = self._tick()
        patience = max(_SLICE, began - self._given)
        self._hear(0.0)
        self._begin_more(wait=False)
        while wait and not self._enough(limit, out_of_patience=time.monotonic() - began >= patience):
            if not self._open and not self._begin_more(wait=True):
                break
            self._hear(_SLICE)
            self._begin_more(wait=False)
        turns = [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
        self._note(len(turns))
        self._given = time.monotonic()
        return [(turn, turn.episode.request()) for turn in turns]

    def complete(self, ticket: OpenEpisode, result: Generation) -> None:
        """Give a sampled turn to the episode's environment."""
        self._note(-1)
        if ticket.episode.ended:  # it was given up meanwhile
            return
        action = ticket.episode.say(result)
        if action is None:
            self._put_aside(ticket)
            return
        ticket.asked = time.monotonic()
        self.session.step(ticket.key, action)

    def resume(self, episodes: Sequence[OpenEpisode]) -> None:
        """Go on with episodes that were put aside in an earlier step. Called before the engine asks for turns."""
        self._open |= {own.key: own for own in episodes}
        self._ready.extend(episodes)
        self.usage.most_open = len(self._open)

    def _enough(self, limit: int, *, out_of_patience: bool) -> bool:
        """Return whether the engine is to begin with the turns that are ready."""
        ready = len(self._ready)
        return ready >= min(limit, max(1, _ENOUGH * len(self._open))) or (ready > 0 and out_of_patience)

    def _begin_more(self, *, wait: bool) -> int:
        """Open as many episodes as may be open; return how many.

        Episodes of peers are taken over only for rows of the engine that would stay empty, ``wait`` says that all do.
        """
        self.check_stop()
        most = self.max_open or _OPEN_PER_ROW * self.rows
        room = (most if self._begun < self.own else min(most, self.rows)) - len(self._open)
        if room <= 0:
            return 0
        with self.device.waiting() if wait else nullcontext():
            taken = self.source.next(room, wait=wait)
        for ticket, item in taken:
            episode, row, seed = self.make(item)
            if self._failed > self.max_failures:
                episode.fail(GIVEN_UP)
                self.source.complete(ticket, episode.result(self.device.worker))
            else:
                own = OpenEpisode(ticket, episode, self.first_key + episode.number, time.monotonic())
                self._open[own.key] = own
                self.session.reset(own.key, row, seed)
        self._begun += len(taken)
        self.usage.most_open = max(self.usage.most_open, len(self._open))
        return len(taken)

    def _hear(self, seconds: float) -> None:
        """Take the answers that are there; where none is, wait up to ``seconds`` for the first."""
        try:
            heard = self.answers.get(timeout=seconds) if seconds else self.answers.get_nowait()
            while True:
                self._take(*heard)
                heard = self.answers.get_nowait()
        except Empty:
            pass
        if self._open and self._failed > self.max_failures:
            self._give_up()

    def _take(self, key: int, answer: Answer, at: float) -> None:
        """Take the answer of an episode's environment."""
        own = self._open.get(key)
        if own is None:  # it was given up meanwhile
            return
        self.usage.environment_seconds.append(at - own.asked)
        episode = own.episode
        try:
            match answer:
                case Failure(reason):
                    episode.fail(reason)
                case Opening():
                    episode.begin(answer)
                case _:
                    episode.hear(answer)
        except Unusable as unusable:
            episode.fail(str(unusable))
        if episode.ended:
            self._failed += episode.failure is not None
            self._finish(own)
        elif episode.spent:
            self._put_aside(own)
        else:
            self._ready.append(own)
        self.device.progress()

    def _finish(self, own: OpenEpisode) -> None:
        del self._open[own.key]
        self.session.close(own.key)
        self.source.complete(own.ticket, own.episode.result(self.device.worker))

    def _put_aside(self, own: OpenEpisode) -> None:
        del self._open[own.key]
        self.put_aside.append(own)

    def _give_up(self) -> None:
        """End all open episodes: more have failed than may, so that the step fails. Peers wait for theirs as well."""
        self._ready.clear()
        for own in [*self._open.values()]:
            own.episode.fail(GIVEN_UP)
            self._finish(own)

    def _note(self, more: int) -> None:
        """Note that the engine has begun or finished turns."""
        self._tick()
        self._under_way += more
        self.device.engine_has(self._under_way)
        self.device.progress()

    def _tick(self) -> float:
        """Add the time since the last call to what the engine's rows were filled for, and return the time."""
        now = time.monotonic()
        self.usage.row_seconds += self._under_way * (now - self._latest)
        self.usage.seconds += now - self._latest
        self._latest = now
        return now
