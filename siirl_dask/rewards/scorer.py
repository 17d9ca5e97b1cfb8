"""A scorer: the resource of the role that gives rewards. It calls one function for each row."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.planner import RoleCost, builds
from siirl_dask.rewards.process_pool import Outcome, Pool, call_reward, describe_exception

RewardFn = Callable[..., Any]
"""``(prompt, response, answer, **extra) -> float | dict[str, float]``, sync or async; ``extra``: columns the node adds.

A dict has the row's reward as ``reward``; whatever else it has is shown and kept beside it.
"""
REWARD_KEY = "reward"
_LARGEST = 3.4028234663852886e38  # as float32
_TAKEN = {"mean", "std", "failures", "greedy", "overlong_penalty"}


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function gave for one row."""

    reward: float | None
    """None where it failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What its dict held, the reward included; empty when it gave a number."""
    failure: str | None = None
    """What went wrong."""


class Scorer:
    """Scores rows with one function: in this thread, on an event loop when it is async, or in a pool of processes."""

    def __init__(self, reward: RewardFn, config: RewardsConfig) -> None:
        self._reward = reward
        self._config = config
        self._is_async = inspect.iscoroutinefunction(reward.func if isinstance(reward, partial) else reward)
        if config.timeout is not None and not config.processes and not self._is_async:
            raise ConfigError(
                f"rewards.timeout={config.timeout:g} needs rewards.processes of at least 1: "
                "a function in the worker itself cannot be stopped"
            )
        self._pool = Pool(reward, config.processes) if config.processes else None

    @property
    def name(self) -> str:
        function = self._reward.func if isinstance(self._reward, partial) else self._reward
        return getattr(function, "__qualname__", repr(function))

    @property
    def max_failures(self) -> int:
        return self._config.max_failures

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One score a row, in order. ``rows`` are the arguments of the function, by name."""
        if self._pool is not None:
            return [_checked(outcome) for outcome in self._pool.call(rows, self._config.timeout)]
        if self._is_async:
            return [_checked(outcome) for outcome in asyncio.run(self._gather(rows))]
        return [_checked(call_reward(self._reward, row)) for row in rows]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    async def _gather(self, rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        at_once = asyncio.Semaphore(self._config.concurrency)

        async def one(row: Mapping[str, Any]) -> Outcome:
            async with at_once:
                limit = asyncio.timeout(self._config.timeout)
                try:
                    async with limit:
                        return await self._reward(**row), None
                except Exception as error:  # whatever a user's function raises is told with its row
                    return None, f"took more than {self._config.timeout} s" if limit.expired() else describe_exception(
                        error
                    )

        return list(await asyncio.gather(*map(one, rows)))


def _checked(outcome: Outcome) -> Score:
    given, failure = outcome
    if failure is not None:
        return Score(None, failure=failure)
    parts = given if isinstance(given, Mapping) else {}
    reward = parts.get(REWARD_KEY) if isinstance(given, Mapping) else given
    numbers = {**parts, REWARD_KEY: reward}
    if bad := {str(name): value for name, value in numbers.items() if not _is_number(value)}:
        return Score(None, failure=f"gave {given!r}: expected a finite number{'' if not parts else f' for {[*bad]}'}")
    if taken := sorted(_TAKEN & parts.keys()):
        return Score(None, failure=f"gave parts named {taken}, as metrics are that there are anyway: rename them")
    return Score(float(reward), {str(name): float(value) for name, value in parts.items()})  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    """And finite as float32, which the column is."""
    return isinstance(value, Real) and abs(value) <= _LARGEST  # type: ignore[operator]


def check_scorer(options: Mapping[str, Any], workers: Sequence[str], config: object) -> RoleCost:
    """The preflight of ``build_scorer``: reward functions take no memory that is known."""
    return RoleCost(memory=0)


@builds(preflight=check_scorer, provides=["scorer"])
def build_scorer(device: Device, rank: Rank, *, rewards: RewardsConfig, reward: Callable[..., Any]) -> Scorer:
    """The scorer of a role. ConfigError when ``rewards`` asks for what the function cannot do."""
    return Scorer(reward, rewards)
