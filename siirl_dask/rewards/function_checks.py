"""Checks a reward function before a run: that it can be called as a reward is, which columns it
needs, and whether it is async.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from numbers import Real
from typing import Any

from siirl_dask.errors import ConfigError
from siirl_dask.planner import bare, options_of
from siirl_dask.rewards.several_rewards import (
    by_source,
    check_by_source,
    check_weighted_sum,
    weighted_sum,
)
from siirl_dask.rewards.trl_functions import check_trl_functions, from_trl
from siirl_dask.rewards.verl_functions import check_verl_function, from_verl
from siirl_dask.wording import function_with_place, value_text

_ALWAYS_PASSED = ("prompt", "response", "answer")


def needed_columns(reward: object, key: str = "rewards.function") -> frozenset[str]:
    """Return the columns that a reward, the value of ``key``, needs besides those that each gets.

    ConfigError, with the file and line of the function, for one that is not called as a reward is.
    """
    if not callable(reward):
        raise ConfigError(
            f"{key}: {value_text(reward)} is no function: expected one that is called as "
            "reward(prompt=, response=, answer=, **columns), or its name, module:function or "
            "file.py:function"
        )
    function = bare(reward)
    if function is from_trl:
        return check_trl_functions(options_of(reward))
    if function is from_verl:
        return check_verl_function(options_of(reward))
    parts: Mapping[str, Callable[..., Any]] = {}
    needed: set[str] = set()
    if function is weighted_sum:
        parts = check_weighted_sum(options_of(reward))
    if function is by_source:
        parts = check_by_source(options_of(reward))
        needed.add("data_source")
    if parts:
        for name, part in parts.items():
            needed |= needed_columns(part, f"rewards.options.rewards.{name}")
        return frozenset(needed)
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return frozenset()
    subject = f"{key}: {function_with_place(reward)}"
    _check_result(function, subject)
    _check_other_packages(parameters, subject)
    return _columns(parameters, subject)


def _check_result(function: object, subject: str) -> None:
    """Raise ConfigError for what gives no number whatever it is called with."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{subject} yields, so a call of it gives no number: expected a function "
            "that returns one, or a dict of numbers with the key 'reward'"
        )
    if inspect.isclass(function) and not issubclass(function, Real | Mapping):
        raise ConfigError(
            f"{subject} is a class, so a call of it gives an object and no number: expected a "
            "function, such as one that calls an object of the class"
        )


def _check_other_packages(parameters: Mapping[str, Parameter], subject: str) -> None:
    """Raise ConfigError for a reward that is written for verl or TRL."""
    if {"solution_str", "ground_truth"} <= parameters.keys():
        raise ConfigError(
            f"{subject} takes solution_str and ground_truth, as a reward of "
            "verl's does, and a reward is called as reward(prompt=, response=, answer=, **columns) "
            "here: give rewards.function=siirl_dask.rewards:from_verl with "
            "rewards.options={function: module:function}, and it is called as verl does"
        )
    if {"prompts", "completions"} <= parameters.keys():
        raise ConfigError(
            f"{subject} takes prompts and completions, as a reward of TRL's does, and a "
            "reward is called as reward(prompt=, response=, answer=, **columns) here: give "
            "rewards.function=siirl_dask.rewards:from_trl with "
            "rewards.options={functions: [module:function]}, and it is called as TRL does"
        )


def _columns(parameters: Mapping[str, Parameter], subject: str) -> frozenset[str]:
    """Return the columns that have no default. ConfigError for a function that does not take the
    prompt, the response and the answer by name.
    """
    by_name = {
        key: one
        for key, one in parameters.items()
        if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }
    lacking = [one for one in _ALWAYS_PASSED if one not in by_name]
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    if lacking and not takes_any:
        taken = ", ".join(
            str(one.replace(annotation=Parameter.empty)) for one in parameters.values()
        )
        raise ConfigError(
            f"{subject} does not take {', '.join(lacking)}: it is called as "
            f"reward(prompt=, response=, answer=, **columns), and takes ({taken})"
        )
    required = {key for key, one in by_name.items() if one.default is Parameter.empty}
    return frozenset(required - {*_ALWAYS_PASSED, "prompt_text", "plain_response"})


def is_async(reward: Callable[..., Any]) -> bool:
    """Return whether a call gives a coroutine: of an async function, or an object that is called so,
    below decorators that say what they wrap; or of ``from_trl``, ``from_verl``, ``weighted_sum``
    or ``by_source`` with such a function.
    """
    function = inspect.unwrap(bare(reward))
    options = options_of(reward)
    if function is from_trl:
        functions = options.get("functions")
        if not isinstance(functions, list | tuple):
            return False
        return any(is_async(each) for each in functions)
    if function in (weighted_sum, by_source):
        rewards = options.get("rewards")
        if not isinstance(rewards, Mapping):
            return False
        return any(is_async(each) for each in rewards.values())
    if function is from_verl:
        wrapped = options.get("function")
        if not callable(wrapped):
            return False
        return is_async(wrapped)
    if inspect.iscoroutinefunction(function):
        return True
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(call)
