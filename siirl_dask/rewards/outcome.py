"""One call of a reward function, and what came of it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Outcome = tuple[Any, str | None]
"""What a function returned, or what went wrong."""


def call(function: Callable[..., Any], row: Mapping[str, Any]) -> Outcome:
    """Call it with the row's columns by name; to its end, if it is async."""
    try:
        given = function(**row)
        return (asyncio.run(given) if inspect.iscoroutine(given) else given), None
    except Exception as error:  # whatever a user's function raises is told with its row
        return None, raised(error)


def raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"
