"""The digest that a JSON object of a run has of itself: a line of metrics, or the summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

KEY = "sha256"
# of 64: found by chance in one altered object of 2**64, and short enough for each line of metrics
_DIGITS = 16


def own_digest(fields: Mapping[str, Any]) -> str:
    """Return the first digits of the SHA-256 of an object without its own digest, in any order
    of its keys.
    """
    rest = {key: value for key, value in fields.items() if key != KEY}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def is_as_written(fields: Mapping[str, Any]) -> bool:
    """Tell whether an object has the digest that it says; true where it says none, as earlier
    versions wrote it.
    """
    if KEY not in fields:
        return True
    return bool(fields[KEY] == own_digest(fields))
