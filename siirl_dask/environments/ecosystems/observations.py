"""How an adapter shows a text of another package's environment to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siirl_dask.environments.answers import after
from siirl_dask.environments.protocol import Opening

SEED = "seed"
"""Column of a row that decides how its episode begins, where ``environments.columns`` has it."""


def seed_of(row: Mapping[str, Any], seed: int) -> int:
    """Return the row's own seed, or else that of the step, as 32 bits, which all packages take."""
    own = row.get(SEED)
    return (seed if own is None else int(own)) % 2**32


def opening_after(row: Mapping[str, Any], text: str) -> Opening:
    """Return the opening in which a text follows the row's prompt: where that is a text, with a
    line's end, after which the model's turn begins.
    """
    prompt = row.get("prompt")
    return Opening(prompt=after(prompt, f"{text}\n" if isinstance(prompt, str) else text))


def observed(row: Mapping[str, Any], text: str) -> str:
    """Return an observation as the model sees it: where the prompt is a text, on lines of its own
    behind the model's turn.
    """
    if isinstance(row.get("prompt"), str):
        return f"\n{text}\n"
    return text
