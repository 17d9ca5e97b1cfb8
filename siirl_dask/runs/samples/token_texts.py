"""Texts of tokens, where the model's ``tokenizer.json`` can be read; without torch or
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from siirl_dask.runs.samples.utterances import Decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_BYTES = 2**26
_JOINED = 8  # tokens that may be one character's bytes


def tokenizer_file(model: str | None) -> str:
    """Return the path of a local model's ``tokenizer.json``; empty without one."""
    path = Path(model or "") / "tokenizer.json"
    if model and "://" not in model and path.is_file():
        return str(path.absolute())
    return ""


def decoder(path: str) -> Decode | None:
    """Return what turns tokens into text; None where there is no tokenizer at ``path``."""
    tokenizer = None
    if path:
        tokenizer = _tokenizer(path)
    if tokenizer is None:
        return None
    return lambda ids, special: str(tokenizer.decode(list(ids), skip_special_tokens=not special))


def pieces(path: str, parts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    """Return texts of the tokens, each with its number of tokens; none where there is no tokenizer
    at ``path``.

    No text is of tokens of two ``parts``.
    """
    decode = decoder(path)
    if decode is None:
        return []
    pieces: list[tuple[str, int]] = []
    for part in parts:
        pieces.extend(token_pieces(part, lambda some: decode(some, True)))
    return pieces


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer of a file; None where it is not there, too large, or none."""
    try:
        from tokenizers import Tokenizer

        if Path(path).stat().st_size <= _MOST_BYTES:
            return Tokenizer.from_file(path)
        return None
    except Exception:  # it raises plain Exceptions for files that it does not understand
        return None


def token_pieces(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, int]]:
    """Return texts of tokens, each with its number of tokens: bytes that are one character
    together stay together.
    """
    pieces: list[tuple[str, int]] = []
    at = 0
    while at < len(ids):
        count = 1
        text = decode(ids[at : at + 1])
        while "\ufffd" in text and count < _JOINED and at + count < len(ids):
            count += 1
            text = decode(ids[at : at + count])
        if "\ufffd" in text:  # no text, however many are joined
            count = 1
            text = decode(ids[at : at + 1])
        pieces.append((text, count))
        at += count
    return pieces
