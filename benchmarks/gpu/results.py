"""Results of the day: a line of JSON for each, written as soon as it is known, and a summary to
read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
Line = Mapping[str, Any]


def append(out: Path, **values: Any) -> None:
    """Append a line to the results in ``out``. It is on the disk before this returns, whatever
    ends the process.
    """
    text = json.dumps(values, default=str) + "\n"
    descriptor = os.open(out / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """Read all lines; one without its end, which was being written when its process ended, does not
    count.

    ValueError names the line that is no JSON object.
    """
    lines = path.read_text().split("\n")
    found = []
    for number, text in enumerate(lines[:-1], start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number} is no JSON: {error}; expected a line that first_run.py wrote"
            ) from error
        if not isinstance(line, dict) or "part" not in line:
            raise ValueError(
                f"{path}:{number} is no result: expected an object with the key 'part'"
            )
        found.append(line)
    return found


def rounded(value: float) -> float:
    """Round to four digits, which is more than any of the figures repeat to."""
    return float(f"{value:.4g}")


def summary(lines: Sequence[Line]) -> str:
    """Describe the lines for a reader, in their order."""
    return "\n".join(text for line in lines for text in _described(line)) + "\n"


def _described(line: Line) -> Iterator[str]:
    rest = {
        key: value
        for key, value in line.items()
        if key not in ("part", "state", "figure", "last", "printed")
    }
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in rest.items())
    if "figure" in line:
        yield f"{line['figure']}: {shown}"
        return
    yield f"{line['part']}: {line['state']}; {shown}"
    for text in line.get("printed", ()):
        yield f"    {text}"
    for text in line.get("last", ()):
        yield f"  | {text}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
