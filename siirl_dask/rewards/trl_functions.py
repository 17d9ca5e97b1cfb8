"""Takes reward functions written for TRL's trainers, unchanged.

rewards:
  function: siirl_dask.rewards:from_trl
  options: {functions: ["my_rewards.py:accuracy", "my_rewards.py:format"], weights: [1.0, 0.1]}
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from typing import Any

from siirl_dask.errors import ConfigError

TrlRewardFn = Callable[..., Any]
"""``(prompts, completions, **columns) -> list[float | None]``, sync or async, as TRL calls it:
each argument is a list with an item for each row."""
_ABSENT = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that belong to TRL's own trainer."""
_ROWS_OWN = {"completion_ids": "response_ids"}
"""Arguments of TRL that are a column of another name here."""


@dataclass(frozen=True, slots=True)
class TrlSignature:
    """Arguments that one of TRL's reward functions takes."""

    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool


@cache
def trl_signature(function: TrlRewardFn) -> TrlSignature:
    """Return the arguments that a function takes; any, where it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return TrlSignature(frozenset(), frozenset(), takes_any=True)
    named = [one for one in parameters if one.kind is not Parameter.VAR_KEYWORD]
    named = [one for one in named if one.kind is not Parameter.VAR_POSITIONAL]
    return TrlSignature(
        names=frozenset(one.name for one in named),
        required=frozenset(one.name for one in named if one.default is Parameter.empty),
        takes_any=any(one.kind is Parameter.VAR_KEYWORD for one in parameters),
    )


def from_trl(
    prompt: Any,
    response: str,
    answer: Any,
    *,
    functions: Sequence[TrlRewardFn],
    weights: Sequence[float] | None = None,
    answer_name: str = "answer",
    **columns: Any,
) -> dict[str, float] | Awaitable[dict[str, float]]:
    """Return the weighted sum of what TRL's reward functions give one row as ``reward``, and what
    each gives under its own name; awaitable where a function is async.

    Each is called with lists of one item: ``prompts``, ``completions``, the answer as
    ``answer_name``, and the columns. Where the prompt is a list of messages, the completion is one
    as well. A function that gives None is left out of the row's sum, as in TRL.

    ValueError where all of them give None: TRL leaves the row out of its loss, and so does
    ``rewards.max_failures``. ValueError as well for another number of rewards than rows, or of
    weights than functions.
    """
    if weights is not None and len(weights) != len(functions):
        raise ValueError(f"{len(weights)} weights for {len(functions)} functions")
    is_chat = isinstance(prompt, list)
    completion = [{"role": "assistant", "content": response}] if is_chat else response
    arguments = {
        "prompts": [prompt],
        "completions": [completion],
        answer_name: [answer],
        **{name: [value] for name, value in columns.items()},
    }
    for theirs, ours in _ROWS_OWN.items():
        if ours in columns:
            arguments[theirs] = [columns[ours]]
    results = [_call(function, arguments) for function in functions]
    if any(inspect.isawaitable(result) for result in results):
        return _awaited(functions, weights, results)
    return _total(functions, weights, results)


def _call(function: TrlRewardFn, arguments: Mapping[str, Any]) -> Any:
    signature = trl_signature(function)
    taken = {
        name: value
        for name, value in arguments.items()
        if signature.takes_any or name in signature.names
    }
    return function(**taken)


async def _awaited(
    functions: Sequence[TrlRewardFn], weights: Sequence[float] | None, results: Sequence[Any]
) -> dict[str, float]:
    async def value_of(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    values = await asyncio.gather(*(value_of(result) for result in results))
    return _total(functions, weights, values)


def _total(
    functions: Sequence[TrlRewardFn], weights: Sequence[float] | None, results: Sequence[Any]
) -> dict[str, float]:
    total = 0.0
    parts: dict[str, float] = {}
    names = function_names(functions)
    for place, (name, result) in enumerate(zip(names, results, strict=True)):
        values = list(result)
        if len(values) != 1:
            raise ValueError(f"{name} gave {len(values)} rewards for 1 row")
        if values[0] is not None:
            parts[name] = float(values[0])
            total += parts[name] * (1.0 if weights is None else weights[place])
    if not parts:
        raise ValueError(
            f"{', '.join(names)} gave None: TRL leaves such a row out of its loss; "
            "rewards.max_failures=N does so for up to N rows of a step"
        )
    return {"reward": total, **parts}


def function_names(functions: Sequence[TrlRewardFn]) -> list[str]:
    """Return a name for each function: its own, with a number where several share one."""
    names: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        if name in names or name == "reward":
            name = f"{name}_{len(names) + 1}"
        names.append(name)
    return names


def check_trl_functions(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the columns that ``from_trl`` with these options needs besides prompt, response and
    answer. ConfigError for what cannot be called as TRL calls it.
    """
    functions = options.get("functions")
    if not functions or isinstance(functions, str):
        raise ConfigError(
            "siirl_dask.rewards:from_trl: its option functions is missing: "
            "rewards.options={functions: ['my_rewards.py:f'], weights: [1.0]}"
        )
    weights = options.get("weights")
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"siirl_dask.rewards:from_trl: {len(weights)} weights for {len(functions)} functions"
        )
    needed: set[str] = set()
    for name, function in zip(function_names(functions), functions, strict=True):
        if not callable(function):
            raise ConfigError(
                f"siirl_dask.rewards:from_trl: {function!r} is no function: expected "
                "module:function or file.py:function"
            )
        signature = trl_signature(function)
        lacking = {"prompts", "completions"} - signature.names
        if lacking and not signature.takes_any:
            raise ConfigError(
                f"siirl_dask.rewards:from_trl: {name} does not take {', '.join(sorted(lacking))}: "
                "expected (prompts, completions, **columns), as TRL calls it"
            )
        foreign = sorted(signature.required & set(_ABSENT))
        if foreign:
            raise ConfigError(
                f"siirl_dask.rewards:from_trl: {name} needs {', '.join(foreign)}, which TRL's own "
                "trainer has: give it a default"
            )
        needed |= signature.required
    provided = {"prompts", "completions", str(options.get("answer_name", "answer"))}
    return frozenset(_ROWS_OWN.get(name, name) for name in needed - provided)
