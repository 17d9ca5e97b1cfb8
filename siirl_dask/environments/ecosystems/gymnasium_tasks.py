"""Environments of gymnasium: ``gymnasium:FrozenLake-v1?is_slippery=false``.

What the policy sees is what the environment draws as text (``render_mode="ansi"``), or the
observation as JSON; its action is the last whole number of its turn. ``observation`` and ``action``
name functions in place of these: ``observation(observation, environment)`` returns the text, and
``action(text, environment)`` an action, or None for a turn that has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium

from siirl_dask.environments.answers import text_of
from siirl_dask.environments.ecosystems.observations import observed, opening_after, seed_of
from siirl_dask.environments.protocol import Opening, Step
from siirl_dask.errors import PlanError
from siirl_dask.planner import resolve
from siirl_dask.planner.spec.ecosystems import EcosystemName, unknown_id

ROWS = 500
_FUNCTIONS = ("observation", "action")
_NUMBER = re.compile(r"[+-]?\d+")
_MOST_DIGITS = 18  # Python refuses to read thousands of them
_COLOURED = re.compile(r"(?:\x1b\[[\d;]*m)+(.*?)(?:\x1b\[0m)+", re.DOTALL)


def environment(name: EcosystemName) -> Callable[..., Any]:
    """Return ``GymnasiumEnvironment`` with the options of ``name``. PlanError for an environment
    that gymnasium does not make, and for actions that are no whole numbers or texts.
    """
    options = dict(name.options)
    given = {part: resolve(options.pop(part)) for part in _FUNCTIONS if part in options}
    trial = _made(name, options)
    try:
        if "action" not in given and not isinstance(trial.action_space, _SPACES):
            raise PlanError(
                f"{name.spelled!r} takes actions of {trial.action_space}, which are no whole "
                "numbers or texts: name a function that makes one of a turn, "
                f"{name.package}:{name.id}?action=mine.py:action"
            )
    finally:
        trial.close()
    return partial(GymnasiumEnvironment, id=name.id, options=options, **given)


_SPACES = (gymnasium.spaces.Discrete, gymnasium.spaces.Text)


def rows(name: EcosystemName, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield rows with seeds one after the other, whose prompt says how to act."""
    options = {key: value for key, value in name.options.items() if key not in _FUNCTIONS}
    trial = _made(name, options)
    prompt = f"You act in {name.id}. {_wanted(trial.action_space)}\n"
    trial.close()
    while True:
        yield {"prompt": prompt, "seed": seed}
        seed += 1


def _made(name: EcosystemName, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        return _make(name.id, options)
    except gymnasium.error.UnregisteredEnv as error:
        raise unknown_id(name, gymnasium.registry) from error
    except Exception as error:  # an environment raises what it likes over its options
        raise PlanError(
            f"{name.spelled!r}: gymnasium does not make it: {type(error).__name__}: {error}"
        ) from error


def _make(name: str, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    environment = gymnasium.make(name, **options)
    if "render_mode" in options or "ansi" not in environment.metadata.get("render_modes", ()):
        return environment
    environment.close()
    return gymnasium.make(name, render_mode="ansi", **options)


def _wanted(space: object) -> str:
    if isinstance(space, gymnasium.spaces.Discrete):
        first = int(space.start)
        return f"Write a whole number from {first} to {first + int(space.n) - 1} each turn."
    return "Write an action each turn."


class GymnasiumEnvironment:
    """An environment of gymnasium, in the protocol of this package."""

    def __init__(
        self,
        *,
        id: str,
        options: Mapping[str, Any] | None = None,
        observation: Callable[..., Any] | None = None,
        action: Callable[..., Any] | None = None,
    ) -> None:
        """``options`` are those of ``gymnasium.make``; the functions are described above."""
        self._environment = _make(id, {} if options is None else options)
        self._observation = observation
        self._action = action
        self._row: Mapping[str, Any] = {}
        # what the policy acts in: a text that equal observations share
        self._state = ""

    def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """Return the row's prompt with the first observation after it."""
        self._row = row
        observation, _ = self._environment.reset(seed=seed_of(row, seed))
        self._state = text_of(observation)
        return opening_after(row, self._text(observation))

    def step(self, text: str) -> Step:
        """Act as the turn says; a turn without an action is answered by what was expected."""
        state = self._state
        action = self._action_in(text)
        if action is None:
            wanted = _wanted(self._environment.action_space)
            return Step(observation=observed(self._row, wanted), state=state)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self._state = text_of(observation)
        return Step(
            observation=observed(self._row, self._text(observation)),
            reward=float(reward),
            done=bool(terminated or truncated),
            state=state,
        )

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _text(self, observation: Any) -> str:
        if self._observation is not None:
            return str(self._observation(observation, self._environment.unwrapped))
        drawn = None
        if self._environment.render_mode == "ansi":
            drawn = self._environment.render()
        if isinstance(drawn, str):
            # colours mark places, such as that of the player
            return _COLOURED.sub(r"[\1]", drawn).strip("\n")
        return text_of(observation)

    def _action_in(self, text: str) -> Any:
        if self._action is not None:
            return self._action(text, self._environment.unwrapped)
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            return text
        found = _NUMBER.findall(text)
        last = ""
        if found:
            last = found[-1]
        number = None
        if 0 < len(last) <= _MOST_DIGITS:
            number = int(last)
        if number is not None and space.contains(number):
            return number
        return None
