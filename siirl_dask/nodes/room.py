"""Room on a worker's device for whoever computes now."""

from __future__ import annotations

from siirl_dask.context import Context


def make_room(ctx: Context) -> None:
    """Have the engines on this worker give back what memory they can, while others of its roles compute."""
    for resource in ctx.resources.values():
        if resource is not ctx.resource and (sleep := getattr(resource, "sleep", None)):
            sleep()
