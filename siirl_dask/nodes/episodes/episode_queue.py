"""The queue from which an engine takes the turns of many episodes, as soon as their environments
have answered.

An engine asks for turns whenever it has free rows. Episodes whose environment has not answered do
not hold it up, since more episodes are open than the engine has rows; there is no barrier, neither
after a turn nor after an episode.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from siirl_dask.context import Device
from siirl_dask.environments import Answer, Failure, Opening, Session
from siirl_dask.nodes.episodes.episode import Episode
from siirl_dask.nodes.episodes.episode_rows import Item
from siirl_dask.nodes.episodes.episode_texts import InvalidAnswer
from siirl_dask.nodes.failures import GIVEN_UP
from siirl_dask.rollout import Generation, GenerationRequest

# seconds within which a wait for environments notices that the worker is to stop
_WAIT_SECONDS = 0.1
# half as many take a fifth longer where one call in 20 is slow (docs/benchmarks/turns.md)
_OPEN_PER_ROW = 8
_BATCH_SHARE = 0.5  # share of the open episodes for which an engine that runs whole batches waits

TimedAnswer = tuple[int, Answer, float]
"""An episode's number in the session, its environment's answer, and the time of the answer."""


@dataclass(slots=True)
class PlayStatistics:
    """Counts of a worker while it plays."""

    environment_seconds: list[float] = field(default_factory=list)
    """Seconds of each call of an environment, until its answer."""
    most_open: int = 0
    """Most episodes that were open at once."""
    row_seconds: float = 0.0
    """Seconds that each of the engine's rows was filled, summed over rows."""
    seconds: float = 0.0

    def filled(self, rows: int) -> float:
        """Return the share of ``rows`` rows that was filled on average."""
        if not rows or not self.seconds:
            return 0.0
        return self.row_seconds / (rows * self.seconds)


@dataclass(slots=True)
class OpenEpisode:
    """An episode whose environment is open."""

    ticket: Any
    """Identifies the episode to the source that it was taken from."""
    episode: Episode
    key: int
    """Its number in the session."""
    called_at: float = 0.0
    """Time at which its environment was last called."""
    is_called: bool = True
    """Whether its environment has not answered yet."""

    @property
    def budget_spent(self) -> bool:
        """Whether the policy may sample no more of it in this step."""
        return self.episode.budget_spent


class HasEnough(Protocol):
    """Returns whether a step is over although episodes are ``under_way``."""

    def __call__(self, under_way: Collection[OpenEpisode], *, all_begun: bool) -> bool: ...


@dataclass(slots=True)
class EpisodeQueue:
    """A RequestQueue whose requests are the next turns of episodes. Used from the thread of the
    node alone.
    """

    source: Any
    """Episodes to play: a queue with ``next(limit, wait=)`` and ``complete(ticket, played)``."""
    own_count: int
    """Number of episodes that the source began with; more are taken over from peers."""
    make_episode: Callable[[Item], tuple[Episode, dict[str, Any], int]]
    """Returns an episode, and the row and the seed that its environment is reset with."""
    session: Session
    answers: SimpleQueue[TimedAnswer]
    device: Device
    check_stop: Callable[[], None]
    max_failures: int
    max_open: int | None = None
    """Most episodes that are open at once; None: eight times the engine's rows."""
    first_key: int = 0
    """Added to an episode's number for its number in the session, which may have those of
    earlier steps."""
    has_enough: HasEnough | None = None
    """Once it is true it stays so: no more turns are given, and what is open is suspended. None:
    each episode is played until it has ended or spent its budget."""
    usage: PlayStatistics = field(default_factory=PlayStatistics)
    rows: int = 0
    """Rows of the engine: the most turns that it has asked for."""
    suspended: list[OpenEpisode] = field(default_factory=list)
    """Episodes that go on in the next step, with their environments open."""
    _open: dict[int, OpenEpisode] = field(default_factory=dict)
    _ready: deque[OpenEpisode] = field(default_factory=deque)
    _begun: int = 0
    """Episodes that were taken from the source."""
    _failed: int = 0
    _running: int = 0
    """Turns that the engine has begun and not finished."""
    _completed: int = 0
    """Episodes whose results the source has."""
    _last_tick: float = field(default_factory=time.monotonic)
    _last_batch: float = field(default_factory=time.monotonic)
    """Time at which the engine got its latest turns."""

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[OpenEpisode, GenerationRequest]]:
        """Return up to ``limit`` turns that are ready; with ``wait`` none only when all episodes
        have ended.

        With ``wait`` the engine has no running turns. It does not begin with a single turn while
        others are ready soon: it waits for half of the open episodes, but no longer than its last
        batch took, so that a wait never costs more than that.
        """
        self.rows = max(self.rows, limit)
        start = self._tick()
        patience = max(_WAIT_SECONDS, start - self._last_batch)
        if self._is_over():  # answers that come from now on are for the next step
            return []
        self._take_answers(0.0)
        if self._is_over():
            return []
        self._begin_more(wait=False)
        while wait and not self._is_batch_ready(
            limit, out_of_patience=time.monotonic() - start >= patience
        ):
            if not self._open and not self._begin_more(wait=True):
                break
            self._take_answers(_WAIT_SECONDS)
            if self._is_over():
                return []
            self._begin_more(wait=False)
        turns = [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
        if turns:
            self._change_running(len(turns))
        self._last_batch = time.monotonic()
        return [(turn, turn.episode.request()) for turn in turns]

    def ended(self) -> bool:
        """Return whether no more turns will come. Aborted when the worker is to stop."""
        self.check_stop()
        if self._open:
            return False
        if self.source.ended():
            return True
        return self._has_enough(all_begun=False)

    def complete(self, ticket: OpenEpisode, result: Generation) -> None:
        """Give a sampled turn to the episode's environment."""
        self._change_running(-1)
        if ticket.episode.ended:  # it was given up meanwhile
            return
        action = ticket.episode.add_turn(result)
        if action is None:
            self._suspend(ticket)
            return
        ticket.called_at = time.monotonic()
        ticket.is_called = True
        self.session.step(ticket.key, action)

    def resume(self, episodes: Sequence[OpenEpisode]) -> None:
        """Continue episodes that were suspended in an earlier step. Called before the engine
        asks for turns.
        """
        for opened in episodes:
            if opened.episode.budget_spent and not opened.is_called:
                self.suspended.append(opened)
                continue
            self._open[opened.key] = opened
            if not opened.is_called:
                self._ready.append(opened)
        self.usage.most_open = len(self._open)

    def _is_over(self) -> bool:
        """Return whether the step has enough. Once the engine has no turn any more, what is open
        is suspended: the answers of called environments are taken in the next step.
        """
        if self.has_enough is None or not self._has_enough(all_begun=self.source.ended()):
            return False
        if not self._running:
            self._ready.clear()
            for opened in [*self._open.values()]:
                self._suspend(opened)
        return True

    def _has_enough(self, *, all_begun: bool) -> bool:
        if self.has_enough is None:
            return False
        return self.has_enough(self._open.values(), all_begun=all_begun)

    def _is_batch_ready(self, limit: int, *, out_of_patience: bool) -> bool:
        """Return whether the engine is to begin with the turns that are ready."""
        ready = len(self._ready)
        if out_of_patience and ready > 0:
            return True
        wanted = max(1, _BATCH_SHARE * len(self._open))
        return ready >= min(limit, wanted)

    def _begin_more(self, *, wait: bool) -> int:
        """Open as many episodes as may be open; return how many were taken from the source.

        Episodes of peers are taken over only for rows of the engine that would stay empty; with
        ``wait`` all of them would.
        """
        self.check_stop()
        most = _OPEN_PER_ROW * self.rows if self.max_open is None else self.max_open
        if self._begun >= self.own_count:
            most = min(most, self.rows)
        may_open = most - len(self._open)
        if may_open <= 0:
            return 0
        with self.device.waiting() if wait else nullcontext():
            taken = self.source.next(may_open, wait=wait)
        for ticket, item in taken:
            episode, row, seed = self.make_episode(item)
            if self._failed > self.max_failures:
                episode.fail(GIVEN_UP)
                self.source.complete(ticket, episode.result(self.device.worker))
            else:
                key = self.first_key + episode.number
                self._open[key] = OpenEpisode(ticket, episode, key, time.monotonic())
                self.session.reset(key, row, seed)
        self._begun += len(taken)
        self.usage.most_open = max(self.usage.most_open, len(self._open))
        return len(taken)

    def _take_answers(self, seconds: float) -> None:
        """Take the answers that have arrived; where there is none, wait up to ``seconds`` for
        the first.
        """
        try:
            timed = self.answers.get(timeout=seconds) if seconds else self.answers.get_nowait()
            while True:
                key, answer, answered_at = timed
                self._take_answer(key, answer, answered_at)
                timed = self.answers.get_nowait()
        except Empty:
            pass
        if self._open and self._failed > self.max_failures:
            self._give_up()

    def _take_answer(self, key: int, answer: Answer, answered_at: float) -> None:
        """Apply the answer of an episode's environment."""
        opened = self._open.get(key)
        if opened is None:  # it was given up meanwhile
            return
        self.usage.environment_seconds.append(answered_at - opened.called_at)
        opened.is_called = False
        episode = opened.episode
        try:
            match answer:
                case Failure(reason):
                    episode.fail(reason)
                case Opening():
                    episode.begin(answer)
                case _:
                    episode.add_step(answer)
        except InvalidAnswer as error:
            episode.fail(str(error))
        if episode.ended:
            if episode.failure is not None:
                self._failed += 1
            self._finish(opened)
        elif episode.budget_spent:
            self._suspend(opened)
        else:
            self._ready.append(opened)
        self.device.progress()

    def _finish(self, opened: OpenEpisode) -> None:
        del self._open[opened.key]
        self.session.close(opened.key)
        self.source.complete(opened.ticket, opened.episode.result(self.device.worker))
        self._completed += 1
        self.device.sampled(self._completed, self.own_count)

    def _suspend(self, opened: OpenEpisode) -> None:
        del self._open[opened.key]
        self.suspended.append(opened)

    def _give_up(self) -> None:
        """End all open episodes: more have failed than may, so that the step fails. Peers wait
        for theirs as well.
        """
        self._ready.clear()
        for opened in list(self._open.values()):
            opened.episode.fail(GIVEN_UP)
            self._finish(opened)

    def _change_running(self, change: int) -> None:
        """Count turns that the engine has begun or finished."""
        self._tick()
        self._running += change
        self.device.engine_has(self._running)
        self.device.progress()

    def _tick(self) -> float:
        """Add the time since the last call to the seconds of the filled rows, and return the
        time.
        """
        now = time.monotonic()
        elapsed = now - self._last_tick
        self.usage.row_seconds += self._running * elapsed
        self.usage.seconds += elapsed
        self._last_tick = now
        return now
