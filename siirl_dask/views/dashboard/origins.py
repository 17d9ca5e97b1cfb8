"""Keeps pages of other sites from reading the run's page: browsers let them send requests to any
port of this machine.

Dask's own pages answer any origin, since they show names of tasks alone; this one shows prompts and
responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest
from tornado.web import ErrorHandler

_ORIGIN = ("Origin", "Sec-Websocket-Origin")
ANY = "*"
"""Entry of Dask's ``allow_websocket_origin`` for any origin, which is its default; the page does
not go by it."""


def refuse_other_sites(app: Any, allowed: Sequence[str], *, hosts: Sequence[str] = ()) -> None:
    """Have a Bokeh application answer 403 to what pages of other sites ask, its websocket among
    it.

    With ``hosts`` it answers requests to hosts of these names, and to addresses, alone: a site may
    point a name of its own at this machine.
    """
    own = app.find_handler

    def find_handler(request: HTTPServerRequest, **kwargs: Any) -> Any:
        name = request.host_name.lower().strip("[]")
        is_known = not hosts  # without a list every name is
        if name in hosts or is_address(name):
            is_known = True
        if is_of_another_site(request, allowed) or not is_known:
            return app.get_handler_delegate(request, ErrorHandler, {"status_code": 403})
        return own(request, **kwargs)

    app.find_handler = find_handler


def is_address(name: str) -> bool:
    """Return whether the name of a host is an IP address, which no site can point elsewhere."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_of_another_site(request: HTTPServerRequest, allowed: Sequence[str]) -> bool:
    """Return whether a browser says that a page of another site asks.

    The page's own origin is the host and port that the browser asked for, also behind a proxy that
    passes on ``Host``. ``allowed`` are hosts with their ports besides, such as
    ``hub.example.org:443``. A link that somebody follows to the page is no such request, and
    programs that are no browsers name no site.
    """
    headers = request.headers
    named = [headers[name] for name in _ORIGIN if name in headers]
    if named:
        return any(not _is_own(origin, request.host, allowed) for origin in named)
    if headers.get("Sec-Fetch-Site") != "cross-site":
        return False
    if headers.get("Sec-Fetch-Mode") != "navigate":
        return True
    return headers.get("Sec-Fetch-Dest") != "document"


def _is_own(origin: str, host: str, allowed: Sequence[str]) -> bool:
    try:
        place = urlsplit(origin).netloc.lower()
    except ValueError:  # an address in brackets that is none
        return False
    if place == "":
        return False
    return place in {host.lower(), *allowed}
