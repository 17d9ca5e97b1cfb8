"""The page ``/siirl`` on Dask's dashboard: a run's curves, timeline, samples and workers while it
goes on.

A run puts the page on the scheduler that it uses. To have it there before the first run, or after
it:

    dask scheduler --preload siirl_dask.views.dashboard

The scheduler imports neither torch nor transformers for it, and Bokeh's part of it when somebody
opens the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler

__all__ = ["dask_setup", "plugin", "served"]


async def dask_setup(scheduler: Scheduler) -> None:
    """Put the page on a scheduler that starts with ``--preload``; Dask calls this by its name."""
    from siirl_dask.views.dashboard.plugin import PagePlugin

    await scheduler.register_scheduler_plugin(PagePlugin(), idempotent=True)
