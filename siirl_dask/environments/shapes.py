"""Recognises what kind of object an environment is by its methods, without importing anybody's library.

    its own            reset(row, seed), step(text)
    tools with state   reset(**row) -> str | None, and documented methods: TRL's ``environment_factory``
    gymnasium          reset(seed=, options=) -> (observation, info), step(action) -> five values
    skyrl-gym          init(prompt) -> (messages, info), step(text) -> a dict

Beside them each may have ``close()``, ``get_reward()`` and ``tools``, the names of its methods that are tools.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from siirl_dask.environments.answers import after
from siirl_dask.environments.protocol import Opening, Step
from siirl_dask.errors import UserError

_NO_TOOLS = frozenset({"reset", "step", "init", "close", "get_reward"})
_TEXT_SPACES = ("Text", "Discrete")
_NUMBER = re.compile(r"[+-]?\d+")


class UnknownShape(UserError):
    """An object is no environment of any kind that is known."""


@dataclass(frozen=True, slots=True)
class EnvironmentFunctions:
    """The functions of one environment, each sync or async; what they return is read by
    ``answers``.
    """

    reset: Callable[[Mapping[str, Any], int], Any]
    """Called with the row's columns and a seed."""
    step: Callable[[str], Any] | None
    """Called with the text of a turn that calls no tool; None: such a turn ends the episode."""
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    reward: Callable[[], Any] | None = None
    """Returns the reward of the episode as it stands."""
    close: Callable[[], Any] | None = None

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        """All functions that an episode waits for, by name."""
        named = {"reset": self.reset, "step": self.step, "get_reward": self.reward, **self.tools}
        return {name: function for name, function in named.items() if function is not None}


def is_async(function: Callable[..., Any] | None) -> bool:
    """Return whether a call of the function gives a coroutine."""
    if isinstance(function, partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def shape_of(thing: object) -> EnvironmentFunctions:
    """Return the shape of an environment, or of a class of environments, whose methods then want a
    ``self``.

    UnknownShape for anything else, with what is missing.
    """
    reset = getattr(thing, "reset", None)
    step = getattr(thing, "step", None)
    common = {"reward": getattr(thing, "get_reward", None), "close": getattr(thing, "close", None)}
    if not callable(reset):
        begin = getattr(thing, "init", None)
        if not (callable(begin) and callable(step)):
            raise UnknownShape(
                f"{_name(thing)} has no reset: expected reset(row, seed) and step(text), or tools"
            )
        return EnvironmentFunctions(_bound(_init, begin), step, _listed_tools(thing), **common)
    names = _parameters(reset)
    if [name.lstrip("_") for name in names][:2] == ["row", "seed"]:
        tools = _listed_tools(thing) if step or hasattr(thing, "tools") else _documented(thing)
        return _checked(thing, EnvironmentFunctions(reset, step, tools, **common))
    if getattr(thing, "action_space", None) is not None or (
        names and set(names) <= {"seed", "options"}
    ):
        numbered = None
        if callable(step):
            numbered = _gym_step(thing, step)
        return _checked(
            thing,
            EnvironmentFunctions(
                _bound(_gym_reset, reset), numbered, _listed_tools(thing), **common
            ),
        )
    if callable(step) and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()
    ):
        raise UnknownShape(
            f"{_name(thing)}.reset takes ({', '.join(names)}): expected reset(row, seed)"
        )
    tools = _documented(thing)
    if "step" in tools:
        step = None
    functions = EnvironmentFunctions(_bound(_reset_by_name, reset), step, tools, **common)
    return _checked(thing, functions)


def _checked(thing: object, shape: EnvironmentFunctions) -> EnvironmentFunctions:
    if not callable(shape.step) and not shape.tools:
        raise UnknownShape(
            f"{_name(thing)} has neither a step nor a documented method: expected one of them"
        )
    return shape


def make(factory: Callable[..., Any], row: Mapping[str, Any]) -> Any:
    """Make an environment. What skyrl-gym's classes ask for they get: the row as ``extras``, and
    an empty config.
    """
    parameters = _parameters(factory)
    wanted: dict[str, Any] = {"extras": dict(row), "env_config": {}}
    bound = {}
    if isinstance(factory, partial):
        bound = factory.keywords
    return factory(
        **{
            name: value
            for name, value in wanted.items()
            if name in parameters and name not in bound
        }
    )


def _name(thing: object) -> str:
    if isinstance(thing, type):
        return thing.__qualname__
    return type(thing).__qualname__


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin
        return {}
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def _listed_tools(thing: object) -> dict[str, Callable[..., Any]]:
    """Return the methods that ``tools`` names. UnknownShape for a name without a method."""
    names = getattr(thing, "tools", ())
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        return {}  # something of the class's own
    missing = [name for name in names if not callable(getattr(thing, name, None))]
    if missing:
        raise UnknownShape(f"{_name(thing)}.tools names {missing}, and it has no such methods")
    return {name: getattr(thing, name) for name in names}


def _documented(thing: object) -> dict[str, Callable[..., Any]]:
    """Return the public methods with a docstring, in the order of their names.

    A ``step`` is one of them, as it would be for TRL, if its argument has a type.
    """
    # members of an instance would evaluate its properties
    kind = thing if isinstance(thing, type) else type(thing)
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    public = [
        name for name, method in methods.items() if not name.startswith("_") and method.__doc__
    ]
    typed = [
        name
        for name in public
        if any(p.annotation is not p.empty for p in _parameters(methods[name]).values())
    ]
    return {
        name: getattr(thing, name)
        for name in public
        if name not in _NO_TOOLS or name in {*typed} & {"step"}
    }


def _bound(call: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call(function, ...)`` as a function that is async where ``function`` is."""
    if not is_async(function):
        return partial(call, function)

    async def calls(*arguments: Any) -> Any:
        return await call(function, *arguments)

    return calls


def _reset_by_name(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> Any:
    """Reset TRL's way: with the row's columns by name. A text that it returns follows the row's
    prompt.
    """
    parameters = _parameters(reset)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name: value for name, value in row.items() if takes_all or name in parameters}
    if "seed" in parameters:
        named["seed"] = seed
    return _after_prompt(reset(**named), row.get("prompt"))


def _after_prompt(answer: Any, prompt: object) -> Any:
    if inspect.isawaitable(answer):

        async def awaited() -> Any:
            return _after_prompt(await answer, prompt)

        return awaited()
    if isinstance(answer, str):
        return Opening(prompt=after(prompt, answer))
    return answer


def _gym_reset(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> Any:
    parameters = _parameters(reset)
    if "options" in parameters:
        return reset(seed=seed, options=dict(row))
    return reset(seed=seed)


def _gym_step(env: Any, step: Callable[..., Any]) -> Callable[[str], Any]:
    """Return a step that takes a text: as it is, or as the last number in it. UnknownShape for
    other actions.
    """
    space = getattr(env, "action_space", None)
    kind = type(space).__name__
    if isinstance(env, type) or space is None or kind == "Text":
        return step
    if kind not in _TEXT_SPACES:
        raise UnknownShape(
            f"{_name(env)} takes actions of {space}, which are no texts: expected a space of "
            f"{' or '.join(_TEXT_SPACES)}, or a wrapper that makes its actions of texts"
        )
    first = int(space.start)
    count = int(space.n)

    def numbered(text: str) -> Any:
        found = _NUMBER.findall(text)
        if not found or not first <= int(found[-1]) < first + count:
            return Step(observation=f"expected a whole number from {first} to {first + count - 1}")
        return step(int(found[-1]))

    return numbered


def _init(begin: Callable[..., Any], row: Mapping[str, Any], seed: int) -> Any:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return begin(prompt)
