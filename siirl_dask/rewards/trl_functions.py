"""Takes reward functions written for TRL's trainers, unchanged.

rewards:
  function: siirl_dask.rewards:from_trl
  options: {functions: ["my_rewards.py:accuracy", "my_rewards.py:format"], weights: [1.0, 0.1]}
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import isnan
from typing import Any

from siirl_dask.errors import ConfigError, counted
from siirl_dask.rewards.several_rewards import all_of, check_weights
from siirl_dask.rewards.signatures import signature_of
from siirl_dask.wording import function_with_place, value_text

TrlRewardFn = Callable[..., Any]
"""``(prompts, completions, **columns) -> list[float | None]``, sync or async, as TRL calls it:
each argument is a list with an item for each row."""
_ABSENT = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that belong to TRL's own trainer."""
_ROWS_OWN = {"completion_ids": "response_ids"}
"""Arguments of TRL that are a column of another name here."""


def from_trl(
    prompt: Any,
    response: str,
    answer: Any,
    *,
    functions: Sequence[TrlRewardFn],
    weights: Sequence[float] | None = None,
    answer_name: str = "answer",
    plain_response: str | None = None,
    **columns: Any,
) -> dict[str, float] | Awaitable[dict[str, float]]:
    """Return the weighted sum of what TRL's reward functions give one row as ``reward``, and what
    each gives under its own name; awaitable where a function is async.

    Each is called with lists of one item: ``prompts``, ``completions``, the answer as
    ``answer_name``, and the columns. Where the prompt is a list of messages, the completion is one
    as well. Its text is ``plain_response``, the response without any special token, as in TRL; None
    where that is ``response``. A function that gives None or NaN is left out of the row's sum, as in
    TRL.

    ValueError where all of them give None or NaN: TRL leaves the row out of its loss, and so does
    ``rewards.max_failures``. ValueError as well for another number of rewards than rows, or of
    weights than functions.
    """
    if weights is not None and len(weights) != len(functions):
        raise ValueError(f"{len(weights)} weights for {len(functions)} functions")
    if plain_response is not None:
        response = plain_response
    completion: str | list[dict[str, str]] = response
    if isinstance(prompt, list):
        completion = [{"role": "assistant", "content": response}]
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
    return function(**signature_of(function).taken(arguments))


async def _awaited(
    functions: Sequence[TrlRewardFn], weights: Sequence[float] | None, results: Sequence[Any]
) -> dict[str, float]:
    return _total(functions, weights, await all_of(results))


def _total(
    functions: Sequence[TrlRewardFn], weights: Sequence[float] | None, results: Sequence[Any]
) -> dict[str, float]:
    total = 0.0
    parts: dict[str, float] = {}
    names = function_names(functions)
    for place, (name, result) in enumerate(zip(names, results, strict=True)):
        if isinstance(result, str | Mapping) or not hasattr(result, "__iter__"):
            raise TypeError(f"{name} gave {value_text(result)}: expected a list of one number")
        values = list(result)
        if len(values) != 1:
            raise ValueError(f"{name} gave {len(values)} rewards for 1 row")
        if values[0] is None:
            continue
        number = _number(name, values[0])
        if isnan(number):  # TRL makes NaN of None, and cannot tell one from the other
            continue
        parts[name] = number
        total += number * (1.0 if weights is None else weights[place])
    if not parts:
        raise ValueError(
            f"{', '.join(names)} gave None or NaN: TRL leaves such a row out of its loss; "
            "rewards.max_failures=N does so for up to N rows of a step"
        )
    return {"reward": total, **parts}


def _number(name: str, value: Any) -> float:
    """Return a reward as TRL takes it, which makes a tensor of all: an array of one is a number."""
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{name} gave {value_text(value)}: expected a number")


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
    if not isinstance(functions, list | tuple) or not functions:
        raise ConfigError(
            "siirl_dask.rewards:from_trl: its option functions is missing, or no list: "
            "rewards.options={functions: ['my_rewards.py:f'], weights: [1.0]}"
        )
    weights = options.get("weights")
    if weights is not None:
        if not isinstance(weights, list | tuple) or len(weights) != len(functions):
            raise ConfigError(
                f"siirl_dask.rewards:from_trl: weights={weights!r:.100} for "
                f"{counted(len(functions), 'function')}: expected a list with one for each"
            )
        check_weights("from_trl", weights)
    needed: set[str] = set()
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"siirl_dask.rewards:from_trl: {function!r} is no function: expected "
                "module:function or file.py:function"
            )
        name = function_with_place(function)
        signature = signature_of(function)
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
