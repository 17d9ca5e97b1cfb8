"""The environments that are open in one process, and the functions of theirs that are called one
by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from siirl_dask.environments.answers import WrongAnswer, cut, opening_of, step_of, text_of
from siirl_dask.environments.protocol import Opening, Step
from siirl_dask.environments.shapes import (
    EnvironmentFunctions,
    UnknownShape,
    is_async,
    make,
    shape_of,
)
from siirl_dask.environments.tools import Schema, schema_of

ONLY = ""
"""Name of the environment where there is one for all rows."""


@dataclass(frozen=True, slots=True)
class World:
    """The environments and tools of a role, as they are sent to its processes."""

    environments: Mapping[str, Callable[..., Any]]
    """Classes or factories by name; ``ONLY`` where there is one."""
    tools: Mapping[str, Callable[..., Any]]
    """Functions without state, by name."""
    most: int
    """Bytes of an observation."""
    schemas: Mapping[str, Sequence[Schema]] = field(default_factory=dict)
    """Schemas of the environments' own tools, by the name of the environment, where it is a
    class."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An environment that was reset."""

    opening: Opening
    tools: Sequence[Schema] = ()
    """Schemas of its own tools, which have its state."""
    takes_text: bool = False
    """Whether it takes turns that call no tool; else such a turn ends the episode."""
    gives_reward: bool = False
    """Whether it tells the reward of the episode as it stands."""


class Caller(Protocol):
    """Calls a function of an environment, sync or async. It raises what the function raises."""

    async def __call__(
        self, function: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any: ...


@dataclass(slots=True)
class Room:
    """Environments by episode. Methods raise what the environments raise, and WrongAnswer."""

    world: World
    call: Caller
    async_only: bool = False
    """Whether only async functions may be called, because others could not be stopped."""
    _open: dict[int, EnvironmentFunctions] = field(default_factory=dict)
    _schemas: dict[type, Sequence[Schema]] = field(default_factory=dict)

    async def reset(self, episode: int, name: str, row: Mapping[str, Any], seed: int) -> Opened:
        """Make an episode's environment, and reset it."""
        thing = await self._made(episode, name, row)
        shape = self._open[episode] = shape_of(thing)
        if self.async_only:
            refuse_blocking(type(thing).__qualname__, shape)
        tools = self.world.schemas.get(name)
        if tools is None:
            if type(thing) not in self._schemas:
                self._schemas[type(thing)] = [schema_of(tool) for tool in shape.tools.values()]
            tools = self._schemas[type(thing)]
        answer = await self.call(shape.reset, row, seed)
        return Opened(
            opening_of(answer, row.get("prompt"), most=self.world.most),
            tools=tools,
            takes_text=shape.step is not None,
            gives_reward=shape.reward is not None,
        )

    async def _made(self, episode: int, name: str, row: Mapping[str, Any]) -> Any:
        """Return a new environment. Who is cancelled waits for it, because what is made must be
        closed.
        """
        making = asyncio.ensure_future(self.call(make, self.world.environments[name], row))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                self._open[episode] = shape_of(making.result())
            raise

    async def step(self, episode: int, text: str) -> Step:
        """Give a turn to an environment."""
        step = self._open[episode].step
        assert step is not None
        return step_of(await self.call(step, text), most=self.world.most)

    async def use(self, episode: int | None, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool: of an episode's environment, or, for None, of one without
        state.
        """
        function = self.world.tools[tool] if episode is None else self._open[episode].tools[tool]
        return cut(text_of(await self.call(function, **arguments)), self.world.most)

    async def reward(self, episode: int) -> float:
        """Return the reward of an episode as it stands; 0 where the environment has none yet."""
        reward = self._open[episode].reward
        assert reward is not None
        value = await self.call(reward)
        if value is not None and not isinstance(value, (int, float)) and not hasattr(value, "item"):
            raise WrongAnswer(f"get_reward gave {type(value).__name__}: expected a number or None")
        total = step_of(Step(reward=0.0 if value is None else value), most=self.world.most).reward
        assert isinstance(total, float)
        return total

    async def close(self, episode: int) -> None:
        """Clean an episode's environment up, if there is one."""
        shape = self._open.pop(episode, None)
        if shape is not None and shape.close is not None:
            await self.call(shape.close)


def refuse_blocking(name: str, shape: EnvironmentFunctions) -> None:
    """Raise UnknownShape for an environment with a function that is not async, which nothing
    could stop.
    """
    blocking = [function for function, call in shape.calls.items() if not is_async(call)]
    if blocking:
        raise UnknownShape(
            f"{name}.{blocking[0]} is not async: environments.timeout needs environments.processes "
            "of at least 1, since a function in the worker itself cannot be stopped"
        )
