"""Several coroutines at once: the first failure cancels the others and is raised as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, _T]) -> list[_T]:
    """Return the results in order. The first exception cancels the rest and is raised once all of them have ended.

    A TaskGroup alone would raise an ExceptionGroup, which no ``except PeerError`` catches.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
