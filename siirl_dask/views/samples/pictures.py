"""Shows the images of a sample's prompt: in words in a terminal, as thumbnails on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siirl_dask.observe import printable
from siirl_dask.runs.samples.prompt_images import PICTURES
from siirl_dask.views.samples.sample_html import thumbnails

IMAGES_ALLOWED = "img-src data:"
"""Directive that a page's Content-Security-Policy needs, so that a browser shows thumbnails."""


def pictures_in_words(sample: Mapping[str, Any]) -> str:
    """Return ``[2 images: 640x480 JPEG, 16x24 PNG]``, and in a line each what cannot be shown; empty without images."""
    pictures = sample.get(PICTURES) or ()
    kinds = [one["kind"] for one in pictures if one["problem"] is None]
    counted = f"{len(kinds)} image{'s' * (len(kinds) != 1)}"
    lines = [f"[{counted}: {', '.join(kinds)}]"] if kinds else []
    return "\n".join([*lines, *(f"[{_line(one['problem'])}]" for one in pictures if one["problem"] is not None)])


def pictures_as_html(sample: Mapping[str, Any]) -> str:
    """Return the thumbnails, and what cannot be shown; empty without images."""
    pictures = sample.get(PICTURES) or ()
    return f"<h4>images</h4>{thumbnails(pictures)}" if pictures else ""


def _line(text: str) -> str:
    return " ".join(printable(text).split())
