"""Takes away or replaces parts of a value, as ``${name#pattern}`` and ``${name/pattern/text}`` do."""

from __future__ import annotations

from fnmatch import fnmatchcase


def trimmed(value: str, operator: str, pattern: str) -> str:
    """Return a value without the shortest or longest beginning or end that matches."""
    places = range(len(value) + 1)
    if operator.startswith("#"):
        found = [place for place in places if fnmatchcase(value[:place], pattern)]
        if not found:
            return value
        end = min(found)
        if operator == "##":
            end = max(found)
        return value[end:]
    found = [place for place in places if fnmatchcase(value[place:], pattern)]
    if not found:
        return value
    start = max(found)
    if operator == "%%":
        start = min(found)
    return value[:start]


def anchored(value: str, anchor: str, pattern: str, replacement: str) -> str:
    """Return a value whose longest beginning or end that matches is replaced."""
    operator = "%%"
    if anchor == "#":
        operator = "##"
    rest = trimmed(value, operator, pattern)
    if rest == value and not fnmatchcase("", pattern):
        return value
    if anchor == "#":
        return replacement + rest
    return rest + replacement


def replaced(value: str, pattern: str, replacement: str, *, everywhere: bool) -> str:
    """Return a value whose first longest part that matches is replaced, or ``everywhere`` each."""
    made: list[str] = []
    place = 0
    while place < len(value):
        ends = range(len(value), place, -1)
        end = next((one for one in ends if fnmatchcase(value[place:one], pattern)), None)
        if end is None:
            made.append(value[place])
            place += 1
            continue
        made.append(replacement)
        place = end
        if not everywhere:
            break
    return "".join(made) + value[place:]
