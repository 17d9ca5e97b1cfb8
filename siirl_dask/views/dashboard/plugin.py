"""Puts the page on a scheduler that runs, and takes what drivers and workers tell.

Dask has no public way to add a page to a dashboard that is up: see ``siirl_dask.dask_internals``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dask
from distributed import SchedulerPlugin
from tornado.ioloop import IOLoop

from siirl_dask.dask_internals import (
    add_dashboard_page,
    add_handlers,
    dashboards_of,
    page_template,
)
from siirl_dask.views.dashboard.origins import ANY, refuse_other_sites
from siirl_dask.views.dashboard.store import RunStore

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("siirl_dask.observe")
NAME = "run-page"  # not siirl-*: those are runs
PATH = "siirl"
"""Path of the page on the dashboard."""
_LAST_LOOK = 4.0  # seconds for a browser to get how a run ended, before its cluster goes
_WATCHED = 2.0  # seconds since a viewer's last look, within which there still is one
_PAUSE = 0.1


class PagePlugin(SchedulerPlugin):
    """Serves the page, and keeps what it shows. The scheduler's handlers ``run-page-*`` take the
    drivers' calls.
    """

    name = NAME
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        self.store = RunStore()
        self.shown = False
        calls = (self.begin, self.record, self.end)
        add_handlers(scheduler, {f"{NAME}-{call.__name__}": call for call in calls})
        try:
            self.shown = add_page(scheduler, self.store)
        except Exception as error:  # another version of Dask's internals: a run needs no page
            logger.warning(
                "the dashboard has no page /%s: %s: %s", PATH, type(error).__name__, error
            )

    async def close(self) -> None:
        try:
            await asyncio.to_thread(self.store.reader.close)
        except RuntimeError:  # a program ends, with its scheduler, and takes no more threads
            self.store.reader.close()

    def begin(self, about: Mapping[str, Any]) -> bool:
        """Note that a run begins; return whether there is a page."""
        if self.shown:
            self.store.begin(about)
        return self.shown

    def record(self, url: str, record: Mapping[str, Any]) -> None:
        """Note a step of a run."""
        self.store.record(url, record)

    async def end(self, url: str, about: Mapping[str, Any]) -> None:
        """Note how a run ended, and wait until a browser that shows it has got that."""
        run = self.store.end(url, about)
        now = time.monotonic()
        if run is None or now - run.looked_at > _WATCHED:
            return
        while run.shown < run.version and time.monotonic() - now < _LAST_LOOK:
            await asyncio.sleep(_PAUSE)

    def log_event(self, topic: str, msg: Any) -> None:
        if isinstance(msg, dict) and msg.get("kind") == "done":
            self.store.event(topic, msg)


def add_page(scheduler: Scheduler, store: RunStore) -> bool:
    """Add the page, and a link to it in the menu of Dask's own pages; return False for a scheduler
    without a dashboard.

    Whatever Dask's internals raise, if they have changed.
    """
    try:
        from bokeh.server.tornado import BokehTornado
    except ImportError:
        return False
    dashboards = dashboards_of(scheduler, BokehTornado)
    if not dashboards:
        return False

    def document(scheduler: Scheduler, extra: Mapping[str, Any], doc: Any) -> None:
        # here: a second of imports that few schedulers need
        from siirl_dask.views.dashboard.page import show_page
        from siirl_dask.views.dashboard.scheduler_source import SchedulerSource
        from siirl_dask.views.dashboard.style import TEMPLATE

        show_page(SchedulerSource(scheduler, store), page_template(TEMPLATE), extra, doc)

    try:
        app = add_dashboard_page(scheduler, PATH, dashboards[0].prefix, document)
    except ImportError:  # Bokeh is there, and is one that Dask does not take
        return False
    named = dask.config.get(
        "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin"
    )
    refuse_other_sites(app, [str(host).lower() for host in named if host != ANY])
    app.initialize(IOLoop.current())
    app.start()
    return True
