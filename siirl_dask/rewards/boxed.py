r"""The answer that a solution marks with LaTeX's ``\boxed{...}``."""

from __future__ import annotations

import re

_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""What is inside the last ``\boxed{...}`` whose braces close; None without one. Takes linear time."""
    opened: list[int | None] = []  # where what is boxed begins, of each brace that is open
    last = (-1, "")
    for brace in _BRACE.finditer(text):
        match brace[0]:
            case "\\{" | "\\}":
                continue
            case "{":
                opened.append(None)
            case "}":
                begin = opened.pop() if opened else None
                if begin is not None and begin > last[0]:
                    last = (begin, text[begin : brace.start()])
            case _:
                opened.append(brace.end())
    return last[1] if last[0] >= 0 else None
