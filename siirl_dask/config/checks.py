"""Checks that the groups of a configuration share: sizes in bytes, and bounds."""

from __future__ import annotations

import re
from pathlib import Path

from siirl_dask.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{k}B": 1000**n for n, k in enumerate("kMGT", 1)},
    **{f"{k}iB": 1024**n for n, k in enumerate("KMGT", 1)},
}


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


def absolute(url: str) -> str:
    """Return a local path as an absolute one: workers may run in another folder. URLs, "" and
    ``???`` stay.
    """
    if url in ("", "???") or "://" in url or "::" in url:
        return url
    path = Path(url)
    return str(path.expanduser() if path.parts[:1] == ("~",) else path.absolute())


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
