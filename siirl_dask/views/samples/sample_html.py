"""Shows a sample as HTML: its text with a colour per token. Responses are untrusted: everything
is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from siirl_dask.observe import printable
from siirl_dask.runs.samples.prompt_images import PICTURES

_FULL = 0.5  # difference of log-probs that has the full colour: a ratio of 1.65
_UNLIKELY = 5.0  # nats at which an unlikely token has the full colour
_RED = "214,69,65"
_BLUE = "56,120,190"
_AMBER = "222,146,30"


def plain_text(text: str) -> str:
    """Return ``text`` as HTML that shows it as it is, line breaks and spaces included."""
    return f'<pre class="siirl-text">{html.escape(text)}</pre>'


def thumbnails(pictures: Sequence[Mapping[str, str | None]]) -> str:
    """Return the images of a prompt as HTML: thumbnails, and in a line each what cannot be shown;
    empty without any.

    Each has ``kind`` and ``url``, a data URL, or ``problem``; see
    ``siirl_dask/runs/samples/prompt_images.py``.
    """
    shown = [
        f'<img src="{html.escape(one["url"])}" alt="{html.escape(one["kind"] or "")}" '
        f'title="{html.escape(one["kind"] or "")}">'
        for one in pictures
        if one["url"] is not None
    ]
    problems = [
        f'<p class="note">{html.escape(" ".join(printable(one["problem"]).split()))}</p>'
        for one in pictures
        if one["problem"] is not None
    ]
    return "".join([*([f"<p>{' '.join(shown)}</p>"] if shown else []), *problems])


def pictures_as_html(sample: Mapping[str, Any]) -> str:
    """Return the thumbnails, and what cannot be shown; empty without images."""
    pictures = sample.get(PICTURES)
    if pictures:
        return f"<h4>images</h4>{thumbnails(pictures)}"
    return ""


def by_ratio(
    pieces: Sequence[tuple[str, int]], sampled: Sequence[float], trained: Sequence[float]
) -> str:
    """Return the pieces as HTML: red where the policy that learns finds a token likelier than the
    engine that drew it, blue where less likely.
    """
    differences = [after - before for before, after in zip(sampled, trained, strict=True)]

    def colour(at: int, count: int) -> tuple[str, float, str]:
        worst = max(differences[at : at + count], key=abs, default=0.0)
        title = (
            f"log-prob {_number(sampled[at])} drawn, {_number(trained[at])} now, ratio "
            f"{_number(_exp(worst))}"
        )
        return (_RED if worst > 0 else _BLUE), _strength(abs(worst), _FULL), title

    return _coloured(pieces, len(differences), colour)


def by_logprob(pieces: Sequence[tuple[str, int]], logprobs: Sequence[float]) -> str:
    """Return the pieces as HTML: the less likely a token was when it was drawn, the stronger its
    colour.
    """

    def colour(at: int, count: int) -> tuple[str, float, str]:
        least = min(logprobs[at : at + count], default=0.0)
        return _AMBER, _strength(-least, _UNLIKELY), f"log-prob {_number(least)}"

    return _coloured(pieces, len(logprobs), colour)


def _coloured(
    pieces: Sequence[tuple[str, int]],
    known: int,
    colour: Callable[[int, int], tuple[str, float, str]],
) -> str:
    shown = []
    at = 0
    for text, count in pieces:
        escaped = html.escape(text)
        if at + count <= known:
            rgb, strength, title = colour(at, count)
            background = ""
            if strength >= 0.01:
                background = f"background:rgba({rgb},{strength:.2f})"
            shown.append(
                f'<span title="{html.escape(title)}" style="{background}">{escaped}</span>'
            )
        else:
            shown.append(escaped)
        at += count
    return f'<pre class="siirl-text">{"".join(shown)}</pre>'


def _strength(value: float, full: float) -> float:
    if math.isfinite(value) and value > 0:
        return 0.85 * min(1.0, value / full)
    return 0.0


def _exp(value: float) -> float:
    if math.isfinite(value):
        return math.exp(min(value, 50.0))
    return math.nan


def _number(value: float) -> str:
    return f"{value:.4g}"
