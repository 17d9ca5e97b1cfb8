"""Servers of environments that speak JSON over HTTP: what their names have in common, and how they
are asked.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from siirl_dask.environments.protocol import Failure, Lost
from siirl_dask.errors import PlanError
from siirl_dask.planner.spec.ecosystems import EcosystemName

if TYPE_CHECKING:
    from siirl_dask.http_client import EndingClient

URL = "url"
"""Option of a name: where its server is."""
LARGEST = 32 * 2**20
"""Bytes of an answer, at most."""
SECONDS = 600.0
"""Longest time for an answer; ``environments.timeout`` is usually shorter."""
_SECONDS_TO_PLAN = 30.0
_LONGEST_REASON = 300  # characters
_NOT_FOUND = (404, 501)


class WrongAnswerError(Exception):
    """A server gave an answer that its protocol does not have."""


def url_of(name: EcosystemName) -> str:
    """Return the address of a name's server. PlanError without one, or with a password in it."""
    url = name.options.get(URL)
    example = f"{name.package}:{name.id}?{URL}=http://127.0.0.1:8000"
    parts = _parts_of(url)
    if parts is None:
        raise PlanError(
            f"{name.spelled!r}: its environments are behind a server: expected its address, as in "
            f"{example}"
        )
    if parts.username is not None or parts.query:
        raise PlanError(
            f"{name.spelled!r}: expected an address without a password or a query, which would be "
            f"stored with the run, as in {example}"
        )
    return str(url).rstrip("/")


def _parts_of(url: object) -> SplitResult | None:
    """Return the parts of an address of HTTP; None for anything else."""
    if not isinstance(url, str):
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # brackets that do not match, or a port that is none
        return None
    if port == 0 or parts.scheme not in ("http", "https"):
        return None
    if parts.hostname:
        return parts
    return None


def ask(name: EcosystemName, path: str, body: object = None) -> Any:
    """Return a server's answer, None where it does not have the path. PlanError where no server
    answers, or not in JSON.
    """
    address = f"{url_of(name)}{path}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    # proxies of the process's environment are for other hosts
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS_TO_PLAN) as answer:
            return json.loads(answer.read(LARGEST))
    except urllib.error.HTTPError as error:
        if error.code in _NOT_FOUND:
            return None
        said = shorten(error.read(_LONGEST_REASON).decode(errors="replace"), _LONGEST_REASON)
        raise PlanError(f"{name.spelled!r}: {address} answers {error.code}: {said}") from error
    except OSError as error:
        raise PlanError(
            f"{name.spelled!r}: no server answers at {address} ({error}): start it first"
        ) from error
    except HTTPException as error:
        raise PlanError(
            f"{name.spelled!r}: {address} answers, and not in HTTP: {type(error).__name__}: "
            f"{str(error).strip()}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name.spelled!r}: {address} answers, and not in JSON: {error}") from error


class JsonSession:
    """A client of one server, with the cookies that the server gave it. It is used from one event
    loop.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: EndingClient | None = None
        self._cookies: dict[str, str] = {}

    async def post(self, path: str, body: object) -> Mapping[str, Any] | Failure:
        """Return what the server answers to ``body``, an object of JSON; a Failure where it answers
        with an error, and Lost where it does not answer.
        """
        from tornado.httpclient import HTTPClientError, HTTPRequest

        from siirl_dask.http_client import EndingClient

        if self._client is None:
            # a client of the event loop's own has ten connections for all episodes
            self._client = EndingClient(force_instance=True, max_clients=1, max_body_size=LARGEST)
        headers = {"Content-Type": "application/json"}
        if self._cookies:
            headers["Cookie"] = "; ".join(f"{key}={value}" for key, value in self._cookies.items())
        request = HTTPRequest(
            f"{self._url}{path}",
            method="POST",
            headers=headers,
            body=json.dumps(body),
            request_timeout=SECONDS,
            # the turn would be left out, and the session's cookies go to whoever is named
            follow_redirects=False,
        )
        try:
            answer = await self._client.ask(request)
        except HTTPClientError as error:
            if error.response is None or error.response.body is None:
                return Lost(f"{path}: {error.message}")
            said = error.response.body.decode(errors="replace")
            return Failure(f"{path} answers {error.code}: {shorten(said, _LONGEST_REASON)}")
        except OSError as error:
            # a port of the client's own differs from run to run
            return Lost(f"{path}: {re.sub('[0-9]{4,}', '...', str(error))}")
        for given in answer.headers.get_list("Set-Cookie"):
            # as it is, quotes included: http.cookies refuses names that servers' balancers give
            key, _, value = given.partition(";")[0].partition("=")
            self._cookies[key.strip()] = value.strip()
        return object_of(answer.body, path)

    def close(self) -> None:
        """End the connection, and a request that is under way."""
        if self._client is not None:
            self._client.close()


def object_of(text: str | bytes, source: str) -> Mapping[str, Any]:
    """Return the object of JSON that a server sent. WrongAnswerError for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongAnswerError(f"{source}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise WrongAnswerError(f"{source} answers with {type(found).__name__}, expected an object")
    return found


def numbers_of(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an answer, to be logged and stored with the reward."""
    return {
        key: float(value) for key, value in answer.items() if isinstance(value, (bool, int, float))
    }
