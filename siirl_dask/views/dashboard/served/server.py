"""Serves the page of a run, or of the runs in a folder, from their files alone.

Nobody else is reached: names that a browser sends are compared with those that are in the folder,
and requests of other sites, or to other hosts, get 403.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from socket import getfqdn, gethostname
from typing import Any
from weakref import WeakKeyDictionary

from bokeh.application import Application
from bokeh.application.handlers.handler import Handler
from bokeh.core.templates import get_env
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from bokeh.server.util import bind_sockets
from siirl_storage import join
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.web import HTTPError, RequestHandler

from siirl_dask.errors import ConfigError, SiirlError, clause
from siirl_dask.runs.reader import is_run
from siirl_dask.views.dashboard.origins import refuse_other_sites
from siirl_dask.views.dashboard.page import show_page
from siirl_dask.views.dashboard.served.folder_source import FolderSource, Looks
from siirl_dask.views.dashboard.served.run_list import (
    MOST_COMPARED,
    list_page,
    run_address,
    runs_in,
)
from siirl_dask.views.dashboard.served.store_threads import StoreThreads
from siirl_dask.views.dashboard.style import SERVED_TEMPLATE
from siirl_dask.views.report.gather import gather
from siirl_dask.views.report.page import page as report_page
from siirl_dask.wording import redacted

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY_ADDRESS = ("0.0.0.0", "::")
_NAME = "name"
_TOKEN_SECONDS = 3600  # within which a page that was loaded may connect
_COMPARED = 600.0  # seconds for all that is read of runs that are compared
_LONGEST = 300  # characters of a name


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """The runs that are served: one, or those in a folder."""

    url: str
    alone: bool
    """True for one run at ``url``."""

    def names(self) -> list[str]:
        """Return the names of the runs that there are now. ConfigError for a store that fails."""
        if self.alone:
            return [self.url.rstrip("/").rpartition("/")[2]]
        return runs_in(self.url)

    def urls(self, names: Collection[str]) -> list[str | None]:
        """Return the URL of each run; None for a name that is none of them. ConfigError for a store
        that fails.
        """
        there = self.names()
        return [self._url_of(name) if name in there else None for name in names]

    def _url_of(self, name: str) -> str:
        if self.alone:
            return self.url
        return join(self.url, name)


def served_runs(url: str) -> ServedRuns:
    """Return the runs at ``url``. ConfigError where there is none."""
    if is_run(url):
        return ServedRuns(url, alone=True)
    if not runs_in(url):
        raise ConfigError(
            f"{url!r} holds no run, and no folder in it does: expected a run's folder, or one of "
            "runs, such as runs"
        )
    return ServedRuns(url, alone=False)


class RunServer:
    """A server on ``address`` and ``port``, 0 for a free one. ConfigError for a port that is taken,
    and for an address that this machine does not have.
    """

    def __init__(self, runs: ServedRuns, address: str, port: int) -> None:
        self._looks = Looks()
        threads = StoreThreads()
        parts = {"runs": runs, "threads": threads}
        patterns: list[Any] = [("/", _ListHandler, parts), ("/compare", _CompareHandler, parts)]
        try:
            sockets, taken = bind_sockets(address, port)
        except OSError as error:
            raise ConfigError(
                f"nothing can be served at {address}, port {port}: {clause(error)}; another --port, or none, "
                "takes one that is free"
            ) from error
        own_name = gethostname().lower()
        shown = address
        if address in _ANY_ADDRESS:
            shown = own_name
        if ":" in shown:
            shown = f"[{shown}]"
        self.address = f"http://{shown}:{taken}/"
        app = BokehTornado(
            {"/run": Application(_RunPages(runs, self._looks, threads))},
            absolute_url=self.address,
            extra_websocket_origins=["*"],  # other sites are refused before Bokeh asks
            extra_patterns=patterns,
            use_index=False,
            session_token_expiration=_TOKEN_SECONDS,
        )
        names = (*LOOPBACK, address.lower(), own_name, getfqdn().lower())
        refuse_other_sites(app, [], hosts=names)
        http = HTTPServer(app)
        http.add_sockets(sockets)
        self._server = BaseServer(IOLoop.current(), app, http)

    def serve(self) -> None:
        """Serve until the process is interrupted."""
        self._server.start()
        try:
            self._server.io_loop.start()
        finally:
            self._looks.reader.close()
            self._server.stop()


class _RunPages(Handler):
    """Makes the page of a run for each viewer: the run is looked for before, in a thread, while
    Bokeh makes documents on the event loop of all pages.
    """

    def __init__(self, runs: ServedRuns, looks: Looks, threads: StoreThreads) -> None:
        super().__init__()
        self._runs = runs
        self._looks = looks
        self._threads = threads
        self._template = get_env().from_string(SERVED_TEMPLATE)
        self._found: WeakKeyDictionary[Any, str | SiirlError | None] = WeakKeyDictionary()

    async def on_session_created(self, session_context: Any) -> None:
        """Look for the run that a viewer asks for."""
        name = _name_of(session_context)
        try:
            (found,) = await self._threads.read(("run", name), partial(self._runs.urls, [name]))
        except SiirlError as error:
            # Bokeh logs what is raised here, and goes on
            self._found[session_context] = error
        else:
            self._found[session_context] = found

    def modify_document(self, doc: Any) -> None:
        """Make the page of the run that was found."""
        found = self._found.pop(doc.session_context)
        if isinstance(found, SiirlError):
            raise HTTPError(502, str(found)) from found
        if found is None:
            raise HTTPError(404, "no run of this name is here")
        name = _name_of(doc.session_context)
        source = FolderSource(self._looks, found, name)
        extra = {"index": "" if self._runs.alone else "./"}
        show_page(source, self._template, extra, doc)
        doc.title = f"{name}: siirl"


def _name_of(session_context: Any) -> str:
    arguments = session_context.request.arguments
    name: str = next(iter(arguments.get(_NAME, ())), b"").decode(errors="replace")
    return name[:_LONGEST]


class _RunsHandler(RequestHandler):
    """Answers with HTML; what it reads, it reads in a thread."""

    def initialize(self, runs: ServedRuns, threads: StoreThreads) -> None:
        self.runs = runs
        self._threads = threads

    async def answer(self, page: Callable[[], str], patience: float | None = None) -> None:
        """Write what ``page`` returns, or why it cannot within ``patience`` seconds."""
        try:
            self.write(await self._threads.read(self.request.uri, page, patience))
        except SiirlError as error:
            self.set_status(502)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"502: {redacted(str(error))}\n")

    def write_error(self, status_code: int, **arguments: Any) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code}: {self._reason}\n")


class _ListHandler(_RunsHandler):
    async def get(self) -> None:
        if self.runs.alone:
            self.redirect(run_address(self.runs.names()[0]))
            return
        await self.answer(self._page)

    def _page(self) -> str:
        return list_page(self.runs.url, self.runs.names())


class _CompareHandler(_RunsHandler):
    async def get(self) -> None:
        names = self.get_arguments(_NAME)[: MOST_COMPARED + 1]
        if not 1 <= len(names) <= MOST_COMPARED:
            raise HTTPError(400, reason=f"choose 1 to {MOST_COMPARED} runs to compare")
        await self.answer(partial(self._page, names), _COMPARED)

    def _page(self, names: Sequence[str]) -> str:
        urls = self.runs.urls(dict.fromkeys(names))
        found = [url for url in urls if url is not None]
        if len(found) < len(urls):
            raise HTTPError(404, reason="there is no run of one of these names")
        return report_page(gather(found))
