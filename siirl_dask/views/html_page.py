"""Pages of HTML that load and run nothing, their texts and tables.

All texts go through ``safe`` or ``shortened``: what a run holds is not trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from siirl_dask.observe import chat_text, printable

_LONGEST = 4000  # characters of a text
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content-Security-Policy: whatever a text says, nothing is loaded but thumbnails within, and no
script runs."""


def html_page(title: str, style: str, body: str) -> str:
    """Return a page with a style sheet and a body that are HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def safe(value: object) -> str:
    """Return a text for HTML, in an element or between quotes, without characters that steer
    anything.
    """
    return escape(printable(str(value)))


def shortened(value: object) -> str:
    """Return a text for HTML with its beginning and end, if it is long; a chat's messages one
    below the other.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = chat_text(value)
    text = printable("" if value is None else str(value)).strip()
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = (
            f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
        )
    return escape(text)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Collection[int] = ()
) -> str:
    """Return a table of cells that are HTML already. The first column and ``texts`` are texts,
    the others numbers.
    """

    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{kind} class="left">{cell}</{kind}>' if at in texts else f"<{kind}>{cell}</{kind}>"
            for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def bar(shares: Sequence[tuple[str, float]]) -> str:
    """Return shares of a whole, each with its class, as one bar."""
    parts = "".join(
        f'<i class="{kind}" style="width:{100 * share:.2f}%"></i>'
        for kind, share in shares
        if share > 0
    )
    return f'<div class="bar">{parts}</div>'
