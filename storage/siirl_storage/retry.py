"""The one policy for errors of a store that pass by themselves: what they are, and how long an
operation is repeated.

An operation that failed so is tried again after a pause that doubles and is drawn at random, so
that many workers do not come back together, until ``retry_seconds()`` have passed since its first
try. The seconds are kept in fsspec's own
configuration: ``set_retry_seconds``, or the environment variable ``FSSPEC_RETRYING_SECONDS``.
Whoever waits for less long than that says so with ``retries_end_at``: what nobody waits for any
more is not tried again.
"""

from __future__ import annotations

import errno
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from traceback import walk_tb
from typing import ParamSpec, TypeVar

from fsspec.config import conf

logger = logging.getLogger("siirl_storage")
Given = ParamSpec("Given")
Result = TypeVar("Result")

RETRY_SECONDS = 120.0
"""Default of ``retry_seconds``: a restart of a gateway or a minute of throttling must not cost a
run."""
_FIRST_PAUSE = 0.1  # seconds
_LONGEST_PAUSE = 10.0  # seconds
_CONFIGURED = "retrying"  # the name under which fsspec's configuration has the seconds
_deadline: ContextVar[float] = ContextVar("siirl_storage_deadline", default=math.inf)
_NEVER = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
_REFUSED = {"huggingface_hub.OfflineModeIsEnabled"}  # a connection that this process does not want
_STATUS = {408, 425, 429, 500, 502, 503, 504, 509, 529}
_CODES = {
    "ConditionalRequestConflict",  # S3's 409 while two conditional writes of one key meet
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EREMOTEIO,  # s3fs's for InternalError
    errno.ETIMEDOUT,
}
_NETWORK = {
    "aiohttp.ClientConnectionError",
    "aiohttp.ClientPayloadError",
    "azure.ServiceRequestError",
    "azure.ServiceResponseError",
    "botocore.ConnectionError",  # to an endpoint that refuses, or times out
    "botocore.HTTPClientError",
    "botocore.ResponseParserError",  # answers under throttling are not always XML
    "http.IncompleteRead",
    "requests.ConnectionError",
    "requests.Timeout",
    "urllib3.HTTPError",
}
"""Errors of connections in the packages below fsspec's filesystems, by package and class; none
is imported here."""


def retry_seconds() -> float:
    """Return the seconds for which a failed operation is repeated in this process; 0: never."""
    return float(conf.get(_CONFIGURED, {}).get("seconds", RETRY_SECONDS))


def set_retry_seconds(seconds: float) -> None:
    """Set ``retry_seconds`` of this process. ValueError for less than 0."""
    if seconds < 0:
        raise ValueError(f"seconds={seconds}: expected 0 or more")
    conf.setdefault(_CONFIGURED, {})["seconds"] = seconds


@contextmanager
def retries_end_at(deadline: float) -> Iterator[None]:
    """Have no operation of this thread inside the block be tried again after ``deadline``, by
    ``time.monotonic()``.

    For a thread whose caller waits for a bounded time: it would go on trying, and warning, when its
    caller has gone.
    """
    token = _deadline.set(min(deadline, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


def retry(operation: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Return ``operation(*args, **kwargs)``, repeated while it fails with an error that passes. It
    must be idempotent.

    The last error is raised as it is, with a note of how often and how long it was tried.
    """
    begun = time.monotonic()
    for attempt in count(1):
        try:
            return operation(*args, **kwargs)
        except Exception as error:
            if not is_transient(error):
                raise
            pause = random.uniform(0.5, 1.0) * min(
                _LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt - 1, 10)
            )
            elapsed = time.monotonic() - begun
            left = _deadline.get() - time.monotonic()
            if elapsed + pause > retry_seconds():
                error.add_note(
                    f"tried {attempt} times in {elapsed:.0f} s; "
                    f"storage.retry_seconds={retry_seconds():g} is the most"
                )
                raise
            if pause > left:
                error.add_note(
                    f"tried {attempt} times in {elapsed:.0f} s, for as long as anybody waited for "
                    "it"
                )
                raise
            logger.warning("%s: %s; trying again in %.1f s", type(error).__name__, error, pause)
        time.sleep(pause)
    raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    """Tell whether ``error`` may pass by itself: a lost connection, a timeout, throttling, a
    failure inside the store.

    An error of the filesystem is judged with its causes, since most filesystems translate what
    their client raised.
    """
    causes = [*_causes(error)]
    if isinstance(error, _NEVER) or any(_name(type(one)) in _REFUSED for one in causes):
        return False
    return any(map(_passes, causes))


def is_of_store(error: BaseException) -> bool:
    """Return whether the driver of a store raised ``error`` for an operation on a filesystem of
    ``open_fs``: an exception of its own, or of the operating system. Others are bugs.
    """
    if type(error).__module__ == "builtins" and not isinstance(error, OSError):
        return False
    modules = {frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)}
    return __name__ in modules


def _causes(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    for _ in range(8):  # a chain may be a circle
        if one is None:
            return
        yield one
        one = one.__cause__


def _passes(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNO:
        return True
    status, code = _answer(error)
    if status in _STATUS or code in _CODES:
        return True
    return not _NETWORK.isdisjoint(map(_name, type(error).__mro__))


def _answer(error: BaseException) -> tuple[object, object]:
    """Return the HTTP status and the store's own code that ``error`` carries, each in one of the
    usual places.
    """
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get(
            "Error", {}
        ).get("Code")
    # aiohttp, azure, gcsfs
    places = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((value for value in places if isinstance(value, int)), None), None


def _name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
