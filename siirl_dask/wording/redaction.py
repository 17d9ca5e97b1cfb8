"""Finds what is secret in a configuration, by its form, and replaces it where the configuration is
recorded or shown.

Commands and URLs have secrets in flags, variables, headers, parameters and logins; mappings under
telling names. A run needs none of what is recorded: it reads its own configuration, also when it is
resumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

_WORD = r"(?:token|password|passwd|secret|credentials?|(?:api|access|auth|secret|private|account)[-_]?key|signature)"
_NAME = rf"[\w.-]*{_WORD}"
_NAMED = re.compile(
    rf"(?:(?:api|access|auth|hf|hub|bearer|secret|session|id|github|gh)[-_]?)?{_WORD}",
    re.IGNORECASE,
)
"""A name in a mapping. ``key`` alone names columns and more there, and ``end_token`` a text of
the model's."""
_RULES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?P<before>(?<![\w-])--?(?:{_NAME}|key|auth)(?:=|\s+))(?P<secret>\"[^\"]*\"|'[^']*'|[^\s\"']+)",  # --token x
        # ?key=x
        rf"(?P<before>[?&;](?:{_NAME}|key|auth|sig|pwd|x-amz-[\w-]+)=)(?P<secret>[^\s&;#\"']+)",
        r"(?P<before>\b[a-z][a-z0-9+.-]*://)(?P<secret>[^\s/@]*(?::[^\s/@]*)?)(?=@)",  # https://user:x@host
        # TOKEN=x
        rf"(?P<before>(?<![^\s\"';])(?:{_NAME}|\w*_key)=)(?P<secret>\"[^\"]*\"|'[^']*'|[^\s\"';]+)",
        r"(?P<before>\b[\w-]+-(?:token|key|secret)\s*:\s*)(?P<secret>[^\s\"',;]+)",  # X-Api-Key: x
        r"(?P<before>\b(?:bearer|basic)\s+)(?P<secret>[\w.+/=~-]{8,})",  # Authorization: Bearer x
    )
)


def redacted(value: Any) -> Any:
    """Return plain data in which each secret is ``[redacted]``; what has none is equal to what
    was given.
    """
    match value:
        case str():
            for rule in _RULES:
                value = rule.sub(lambda found: f"{found['before']}{REDACTED}", value)
            return value
        case Mapping():
            return {name: _of_name(str(name), item) for name, item in value.items()}
        case list():
            return [redacted(item) for item in value]
        case tuple():
            return tuple(redacted(item) for item in value)
    return value


def _of_name(name: str, value: Any) -> Any:
    if isinstance(value, str) and value and _NAMED.fullmatch(name):
        return REDACTED
    return redacted(value)
