"""Reports the accelerators that a worker sees, before a run is planned for them."""

from __future__ import annotations

import asyncio

Accelerators = dict[str, bool]
"""Names of accelerators, as their makers call them, each with whether it computes in bfloat16."""


async def accelerators_here() -> Accelerators:
    """Return the accelerators that this process sees.

    A thread looks for them: torch takes seconds to load, and a worker's event loop must not stand
    still.
    """
    return await asyncio.to_thread(_find_accelerators)


def _find_accelerators() -> Accelerators:
    from siirl_dask.devices import DeviceKind, accelerator

    kind = accelerator.kind_here()
    if kind is DeviceKind.CPU:
        return {}
    found: Accelerators = {}
    for index in range(accelerator.count(kind)):
        name = accelerator.name_of(kind, index)
        found[name] = accelerator.has_bfloat16(kind, index)
    return found
