"""Texts as a report shows them. All goes through ``safe`` or ``shortened``: what a run holds is not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from siirl_dask.observe import printable

_LONGEST = 4000  # characters of a text


def safe(value: object) -> str:
    """Return a text for HTML, in an element or between quotes, without characters that steer anything."""
    return escape(printable(str(value)))


def shortened(value: object) -> str:
    """Return a text for HTML with its beginning and end, if it is long; a chat's messages one below the other."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = "\n".join(str(m["content"] if isinstance(m, Mapping) and "content" in m else m) for m in value)
    text = printable("" if value is None else str(value)).strip()
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    return escape(text)
