"""Reads which arguments a function takes by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any


@dataclass(frozen=True, slots=True)
class Signature:
    """Arguments that a function takes by name."""

    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool

    def taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``arguments`` that the function takes."""
        return {
            name: value for name, value in arguments.items() if self.takes_any or name in self.names
        }


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the arguments that a function takes; any, where it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return Signature(frozenset(), frozenset(), takes_any=True)
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    named = [one for one in parameters if one.kind in by_name]
    return Signature(
        names=frozenset(one.name for one in named),
        required=frozenset(one.name for one in named if one.default is Parameter.empty),
        takes_any=any(one.kind is Parameter.VAR_KEYWORD for one in parameters),
    )


PASSED_IF_NAMED = ("prompt_text", "plain_response", "turns")
"""Columns of a rollout that a reward function gets where it has an argument of that name, and the
rollout has the column, without a word of the node that scores."""


def named_columns(reward: Callable[..., Any]) -> tuple[str, ...]:
    """Return those of ``PASSED_IF_NAMED`` that a reward function has an argument for."""
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return ()
    return tuple(name for name in PASSED_IF_NAMED if name in parameters)
