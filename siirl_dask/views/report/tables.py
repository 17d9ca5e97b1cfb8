"""Tables of a report."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Collection[int] = ()) -> str:
    """Return a table of cells that are HTML already. The first column and ``texts`` are texts, the others numbers."""

    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{kind} class="left">{cell}</{kind}>' if at in texts else f"<{kind}>{cell}</{kind}>"
            for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def bar(shares: Sequence[tuple[str, float]]) -> str:
    """Return shares of a whole, each with its class, as one bar."""
    parts = "".join(f'<i class="{kind}" style="width:{100 * share:.2f}%"></i>' for kind, share in shares if share > 0)
    return f'<div class="bar">{parts}</div>'
