"""Waiting for several things at once, such that a failure of one ends the others and is raised as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def together(*work: Coroutine[Any, Any, _T]) -> list[_T]:
    """The results, in order. The first exception cancels the rest and is raised once they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
