"""Checks that the groups of a configuration share: sizes in bytes, and bounds."""

from __future__ import annotations

import re
from math import isinf
from pathlib import Path

from siirl_dask.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{k}B": 1000**n for n, k in enumerate("kMGT", 1)},
    **{f"{k}iB": 1024**n for n, k in enumerate("KMGT", 1)},
}
_VARIABLE = re.compile(r"(?:^|/)\$([A-Z_][A-Z0-9_]*)(?=/|$)")
_WINDOWS = re.compile(r"[A-Z]:[\\/](?!/)")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


def parse_bytes(key: str, text: str) -> int:
    """Return the bytes of ``2GiB``, ``500 MB`` or ``1000000``. ConfigError, naming ``key``, for
    another text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"{key}={text!r}: expected a number of bytes, such as 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_ports(key: str, text: str) -> range:
    """Return the ports of ``20000`` or ``20000:20100``, the last one included. ConfigError, naming
    ``key``, for another text.
    """
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", str(text))
    if match is not None:
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if 0 < first <= last < 65536:
            return range(first, last + 1)
    raise ConfigError(
        f"{key}={text!r}: expected a port, or a range such as 20000:20100, of 1 to 65535"
    )


def check_location(key: str, url: str) -> None:
    """Raise ConfigError, naming ``key``, for a path or URL of a form that nothing can be meant by:
    it would be a local path in the folder of the command, and be made there.
    """
    variable = _VARIABLE.search(url)
    if variable is not None and not Path(url).exists():
        raise ConfigError(
            f"{key}={url!r}: no shell reads this: write ${variable[1]} as ${{oc.env:{variable[1]}}} in a "
            "configuration, and leave out the quotes around it on a command line"
        )
    if url.startswith("[") and url.endswith("]") and not Path(url).exists():
        raise ConfigError(f"{key}={url!r}: expected one path or URL, and this is a list")
    if url != url.strip():
        raise ConfigError(f"{key}={url!r}: begins or ends with a blank: leave it out")
    if _WINDOWS.match(url):
        raise ConfigError(
            f"{key}={url!r}: is a path of Windows: expected one of this machine, as /mnt/c/... in WSL"
        )
    protocol = _ONE_SLASH.match(url)
    if protocol is not None and not Path(url).exists():
        raise ConfigError(f"{key}={url!r}: expected {protocol[1]}:// with two slashes")


def located(key: str, url: str) -> str:
    """Return a local path as an absolute one: workers may run in another folder. URLs, "" and
    ``???`` stay. ConfigError as of ``check_location``.
    """
    check_location(key, url)
    if url in ("", "???") or "://" in url or "::" in url:
        return url
    path = Path(url)
    return str(path.expanduser() if path.parts[:1] == ("~",) else path.absolute())


def finite(group: str, **values: float) -> None:
    """Raise ConfigError for a value that is infinite."""
    for name, value in values.items():
        if isinf(value):
            raise ConfigError(f"{group}.{name}={value!r}: expected a finite number")


def at_least(group: str, least: float, **values: float) -> None:
    """Raise ConfigError for a value below ``least``."""
    for name, value in values.items():
        if not value >= least:
            raise ConfigError(f"{group}.{name}={value!r}: expected at least {least}")


def above(group: str, bound: float, **values: float) -> None:
    """Raise ConfigError for a value that is not above ``bound``."""
    for name, value in values.items():
        if not value > bound:
            raise ConfigError(f"{group}.{name}={value!r}: expected more than {bound}")
