"""Texts of single tokens, where the model's ``tokenizer.json`` can be read; without torch or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from siirl_dask.observe.sample_html import token_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_BYTES = 2**26


def pieces(path: str, ids: Sequence[int]) -> list[tuple[str, int]]:
    """Return texts of the tokens, each with its number of tokens; none where there is no tokenizer at ``path``."""
    tokenizer = _tokenizer(path) if path else None
    if tokenizer is None:
        return []
    return token_pieces(ids, lambda some: str(tokenizer.decode(list(some), skip_special_tokens=False)))


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer of a file; None where it is not there, too large, or none."""
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(path) if Path(path).stat().st_size <= _MOST_BYTES else None
    except Exception:  # it raises plain Exceptions for files that it does not understand
        return None
