"""Sends what the driver knows to the run's page on the scheduler: where the run is, and a small
record per step.

An error here does not end the run: it is logged, and the run goes on without a page.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.dask_internals import SchedulerRpc, start_on_loop
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.observe import Record, Status
from siirl_dask.runs.samples.token_texts import tokenizer_file
from siirl_dask.views.dashboard.plugin import NAME, PATH, PagePlugin
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.driver")
_TIMEOUT = 10.0  # seconds for the scheduler to add the page
_END_TIMEOUT = 8.0  # seconds for viewers to be shown the end
_STATUS = "/status"  # end of the address of Dask's own first page


class RunPage:
    """The page of one run, as far as a scheduler has one. Without one, every method does
    nothing.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._url = ""

    def begin(
        self,
        client: Client,
        config: Config,
        url: str,
        plugin: str,
        members: Mapping[str, str],
        done: int,
    ) -> str:
        """Show the run on the client's scheduler, or show it again; return the address to print.

        That is the page's, or Dask's own where there is none, because ``observe.dashboard`` or the
        scheduler's dashboard is off. ``members`` are workers and addresses, ``done`` the steps
        trained before.
        """
        address = ""
        if client.dashboard_link is not None:
            address = client.dashboard_link
        self._client = None
        if not config.observe.dashboard:
            return address
        about = {
            "url": url,
            "name": config.run.name,
            "plugin": plugin,
            "members": dict(members),
            "done": done,
            "steps": config.run.steps,
            "tokenizer": tokenizer_file(config.model.path),
        }
        try:
            complete(client, lambda: client.register_plugin(PagePlugin()), timeout=_TIMEOUT)
            shown = complete(client, lambda: _call(client, "begin", about=about), timeout=_TIMEOUT)
        except Exception as error:  # whatever a scheduler answers: a run needs no page
            logger.info("the dashboard has no page of the run: %s: %s", type(error).__name__, error)
            return address
        if not shown:
            return address
        self._client = client
        self._url = url
        # Dask's configuration may set another: distributed.dashboard.link
        if not address.endswith(_STATUS):
            return address
        return address.removesuffix(_STATUS) + f"/{PATH}"

    def write(self, record: Record) -> None:
        """Show a record; nobody waits until it is there."""
        client = self._client
        if client is None or client.status != "running" or client.loop is None:
            return
        sent = {**record, "phase": str(record["phase"])}
        start_on_loop(client, _send(client, "record", url=self._url, record=sent))

    def end(self, status: Status, error: str = "", resume: str | None = None) -> None:
        """Show how the run ended, and wait a moment until those who look have seen it."""
        client = self._client
        if client is None or client.status != "running":
            return
        about = {"status": str(status), "error": redacted(error), "resume": redacted(resume or "")}
        try:
            complete(
                client,
                lambda: _call(client, "end", url=self._url, about=about),
                timeout=_END_TIMEOUT,
            )
        except Exception as error_of_page:  # a scheduler that is gone, which others report
            kind = type(error_of_page).__name__
            logger.debug("the page was not shown the end: %s: %s", kind, error_of_page)


async def _send(client: Client, operation: str, **arguments: Any) -> None:
    try:
        await _call(client, operation, **arguments)
    except Exception as error:  # a scheduler that is gone: others find out, and report it
        logger.debug("the page did not get it: %s: %s", type(error).__name__, error)


async def _call(client: Client, operation: str, **arguments: Any) -> Any:
    return await SchedulerRpc(client).call(f"{NAME}-{operation}", **arguments)
