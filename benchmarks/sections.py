"""Pages of which several benchmarks write a section each."""

from __future__ import annotations

from pathlib import Path


def replace_section(page: Path, text: str) -> None:
    """Write ``text``, which begins with its heading, over the section of that heading, or to the
    end of the page.
    """
    heading = text.splitlines()[0]
    before, found, after = (page.read_text() if page.exists() else "").partition(heading)
    _, rule, rest = after.partition("\n## ") if found else ("", "", "")
    parts = [before.strip("\n"), text.strip("\n"), f"## {rest}".strip("\n") if rule else ""]
    page.write_text("\n\n".join(filter(None, parts)) + "\n")
