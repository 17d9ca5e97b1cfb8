"""The scorer: the resource of the role that gives rewards. It calls one reward function for each
row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device, HoldsNoGroups, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.planner import RoleCost, builds
from siirl_dask.rewards.child_process import Outcome
from siirl_dask.rewards.event_loop import LoopCalls
from siirl_dask.rewards.function_checks import is_async, needed_columns
from siirl_dask.rewards.numbers import number_of
from siirl_dask.rewards.process_pool import Pool, PoolCalls, Row, call_reward
from siirl_dask.rewards.signatures import named_columns
from siirl_dask.wording import function_label, value_text

RewardFn = Callable[..., Any]
"""``(prompt, response, answer, **extra) -> float | dict[str, float]``, sync or async; ``extra``
holds the columns that the node adds. The key ``reward`` of a dict trains; its other entries are
logged and saved beside it.
"""
REWARD_KEY = "reward"
_LARGEST = 3.4028234663852886e38  # the largest float32
_METRIC_NAMES = {"mean", "std", "failures", "greedy", "overlong_penalty"}


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a reward function for one row. It has neither reward nor failure for a row
    that was not scored.
    """

    reward: float | None = None
    """The reward; None where the function failed or was not called."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """All numbers of the dict that the function gave, the reward included; empty when it gave a
    number."""
    failure: str | None = None
    """The reason why there is no reward."""


class Scorer(HoldsNoGroups):
    """Scores rows with one function: in this thread, on an event loop when it is async, or in a
    pool of processes.

    ``device.progress`` is called for each row that has its outcome, and ``device.bind`` in the
    thread of the event loop.
    """

    def __init__(self, reward: RewardFn, config: RewardsConfig, device: Device) -> None:
        self._reward = reward
        self._progress = device.progress
        self._bind = device.bind
        self._config = config
        self._is_async = is_async(reward)
        _check_timeout(reward, config)
        self._pool = None
        if config.processes:
            self._pool = Pool(reward, config.processes)

    @property
    def named_columns(self) -> tuple[str, ...]:
        """Columns of a rollout, such as ``prompt_text``, that the function has an argument for."""
        return named_columns(self._reward)

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return function_label(self._reward)

    @property
    def max_failures(self) -> int:
        """Rows of a step, over all workers, that may fail."""
        return self._config.max_failures

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Return one score a row, in order. ``rows`` are the arguments of the function, by name.

        Scoring stops as soon as more than ``max_failures`` rows have failed: the rest is left
        without a score.
        """
        if self.works_beside:
            scoring = self.begin()
            for index, row in enumerate(rows):
                scoring.add(index, partial(_itself, row))
            scores = scoring.finish()
        else:
            collector = _ScoreCollector(self.max_failures, self._progress)
            for index, row in enumerate(rows):
                if not collector.take(index, call_reward(self._reward, row)):
                    break
            scores = collector.scores
        return [scores.get(index, Score()) for index in range(len(rows))]

    @property
    def works_beside(self) -> bool:
        """Whether the function runs in processes of its own or is async, so that its caller can
        do something else.
        """
        if self._pool is not None:
            return True
        return self._is_async

    def begin(self) -> Scoring:
        """Begin to score rows that come one after the other; only for a scorer that
        ``works_beside``.
        """
        assert self.works_beside
        collector = _ScoreCollector(self.max_failures, self._progress)
        timeout = self._config.timeout
        if self._pool is not None:
            return Scoring(collector, PoolCalls(self._pool, timeout, collector.take))
        concurrency = self._config.concurrency
        calls = LoopCalls(self._reward, timeout, concurrency, collector.take, self._bind)
        return Scoring(collector, calls)

    def close(self) -> None:
        """End the processes of the pool."""
        if self._pool is not None:
            self._pool.close()


def _itself(row: Row) -> Row:
    return row


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores rows as they come, beside the thread that brings them."""

    _collector: _ScoreCollector
    _calls: PoolCalls | LoopCalls

    def add(self, key: Hashable, row: Callable[[], Row]) -> None:
        """Score a row, whose arguments ``row`` gives when it is its turn. Any thread may call
        this.
        """
        self._calls.add(key, row)

    @property
    def done(self) -> int:
        """Number of rows that have their score."""
        return len(self._collector.scores)

    def finish(self) -> dict[Hashable, Score]:
        """Wait, and return the score of each row by its key; after too many failures some have
        none.
        """
        self._calls.finish()
        return self._collector.scores

    def cancel(self) -> None:
        """Score no other row, and end the calls that are under way."""
        self._calls.cancel()


class _ScoreCollector:
    """Collects the scores of some rows and counts the failures among them."""

    def __init__(self, max_failures: int, progress: Callable[[], None]) -> None:
        self._progress = progress
        self.scores: dict[Hashable, Score] = {}
        self._failures = 0
        self._max_failures = max_failures

    def take(self, key: Hashable, outcome: Outcome) -> bool:
        """Note a row's outcome. Returns True when the next row may be scored."""
        self._progress()
        score = self.scores[key] = score_of(outcome)
        self._failures += score.failure is not None
        return self._failures <= self._max_failures


def score_of(outcome: Outcome) -> Score:
    """Return the score that an outcome makes; a failure where the function gave anything but
    finite numbers.
    """
    result, failure = outcome
    if failure is not None:
        return Score(failure=failure)
    given: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        given = result
    if not all(_can_be_a_name(name) for name in given):
        return Score(failure=f"gave {value_text(result)}: expected texts as names of its numbers")
    parts = {name: number_of(value) for name, value in given.items()}
    reward = parts.get(REWARD_KEY)
    if not isinstance(result, Mapping):
        reward = number_of(result)
    numbers = {**parts, REWARD_KEY: reward}
    bad = [str(name) for name, value in numbers.items() if not _is_number(value)]
    if bad:
        which = ""
        if parts:
            which = f" for {bad}"
        return Score(failure=f"gave {value_text(result)}: expected a finite number{which}")
    taken = sorted(_METRIC_NAMES & parts.keys())
    if taken:
        return Score(
            failure=f"gave parts named {taken}, which are names of metrics already: rename them"
        )
    return Score(float(reward), {str(name): float(value) for name, value in parts.items()})  # type: ignore[arg-type]


def _can_be_a_name(name: object) -> bool:
    """Return whether a number of a dict can be logged and stored under its name."""
    try:
        str(name).encode()
    except Exception:  # half of a surrogate pair, or an object's own __str__
        return False
    return True


def _is_number(value: object) -> bool:
    """Return whether a value is a number that is finite as float32, the type of the column."""
    if not isinstance(value, Real):
        return False
    return abs(value) <= _LARGEST  # type: ignore[operator]


def check_scorer(options: Mapping[str, Any], workers: Sequence[str], config: object) -> RoleCost:
    """Return what ``build_scorer`` needs: no memory that is known, and the columns for which the
    reward function has no default. ConfigError for a function that is not called as a reward is.
    """
    columns = needed_columns(options["reward"])
    _check_timeout(options["reward"], options["rewards"])
    return RoleCost(memory=0, columns=columns)


def _check_timeout(reward: RewardFn, config: RewardsConfig) -> None:
    if config.timeout is not None and not config.processes and not is_async(reward):
        raise ConfigError(
            f"rewards.timeout={config.timeout:g} needs rewards.processes of at least 1: "
            "a function in the worker itself cannot be stopped"
        )


def works_beside(options: Mapping[str, Any]) -> bool:
    """Tell whether the scorer of these options works in processes of its own, or calls an async
    function.
    """
    if options["rewards"].processes:
        return True
    return is_async(options["reward"])


@builds(preflight=check_scorer, provides=["scorer"], beside=works_beside)
def build_scorer(
    device: Device,
    rank: Rank,
    *,
    rewards: RewardsConfig,
    reward: Callable[..., Any],
) -> Scorer:
    """Return the scorer of a role. ConfigError when ``rewards`` asks for what the function
    cannot do.
    """
    return Scorer(reward, rewards, device)
