"""Finds where quotes, brackets and words of a script's text end."""

from __future__ import annotations

from siirl_dask.errors import ConfigError

_CLOSERS = {"(": ")", "{": "}"}


def after_quote(source: str, place: int) -> int:
    """Return the place after the string in double quotes that begins at ``place``."""
    place += 1
    while place < len(source):
        letter = source[place]
        if letter == '"':
            return place + 1
        if letter == "\\":
            place += 2
        elif letter == "$" and source[place + 1 : place + 2] in _CLOSERS:
            place = after_bracket(source, place + 1)
        else:
            place += 1
    raise ConfigError(f"a quote is never closed: {source[:80]}")


def after_single_quote(source: str, place: int) -> int:
    """Return the place after the string in single quotes that begins at ``place``."""
    end = source.find("'", place + 1)
    if end < 0:
        raise ConfigError(f"a quote is never closed: {source[:80]}")
    return end + 1


def after_bracket(source: str, place: int) -> int:
    """Return the place after the bracket that closes the one at ``place``."""
    opener = source[place]
    closer = _CLOSERS[opener]
    depth = 0
    while place < len(source):
        letter = source[place]
        if letter == "\\":
            place += 2
        elif letter == "'":
            place = after_single_quote(source, place)
        elif letter == '"':
            place = after_quote(source, place)
        else:
            depth += (letter == opener) - (letter == closer)
            place += 1
            if depth == 0:
                return place
    raise ConfigError(f"{opener} is never closed: {source[:80]}")


def after_piece(source: str, place: int) -> int:
    """Return the place after one letter, quoted string or reference."""
    letter = source[place]
    if letter == "\\":
        return place + 2
    if letter == "'":
        return after_single_quote(source, place)
    if letter == '"':
        return after_quote(source, place)
    if letter == "`":
        end = source.find("`", place + 1)
        if end < 0:
            return len(source)
        return end + 1
    if letter == "$" and source[place + 1 : place + 2] in _CLOSERS:
        return after_bracket(source, place + 1)
    return place + 1


def split_source(source: str) -> list[str]:
    """Return the words of a command as they are written, quotes and references and all."""
    words: list[str] = []
    place = 0
    start: int | None = None
    while place < len(source):
        is_space = source[place].isspace()
        is_joint = source.startswith("\\\n", place)
        if not is_space and not is_joint:
            if start is None:
                start = place
            place = after_piece(source, place)
            continue
        # a continued line within a word goes on with that word
        if start is not None and (is_space or source[place + 2 : place + 3].isspace()):
            words.append(source[start:place])
            start = None
        place += 1 if is_space else 2
    if start is not None:
        words.append(source[start:])
    return words


def first_word(source: str) -> str:
    """Return the word that a text begins with, as it is written; it may be empty."""
    place = 0
    while place < len(source) and source[place] not in " \t\n;&|()<>":
        place = after_piece(source, place)
    return source[:place]


def split_at(source: str, separator: str) -> list[str]:
    """Return the parts of a text between separators outside of quotes, as they are written."""
    parts = [""]
    place = 0
    while place < len(source):
        end = after_piece(source, place)
        if source[place] == separator:
            parts.append("")
        else:
            parts[-1] += source[place:end]
        place = end
    return parts
