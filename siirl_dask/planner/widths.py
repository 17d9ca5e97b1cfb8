"""How many bytes a column takes, at most: from its type, and built-in ones from the longest prompt and response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from siirl_dask.schema import (
    ADVANTAGES,
    COVARIANT,
    FINISH_REASON,
    KL_PENALTY,
    OLD_LOGPROBS,
    PROMPT_IDS,
    PROMPT_TEXT,
    REFERENCE_LOGPROBS,
    RESPONSE,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    ROLLOUT_LOGPROBS,
    TOKEN_VERSIONS,
    VALUES,
    WORKER,
    DataType,
)

_OFFSET = 4  # bytes per row that Arrow spends on where a list or string ends
_FINISH_REASONS = len("length")
_OF_RESPONSES = (
    RESPONSE_IDS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    KL_PENALTY,
    VALUES,
    ADVANTAGES,
    RETURNS,
    COVARIANT,
    TOKEN_VERSIONS,
)
"""Lists with a value for each token of the response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Upper bounds that a plan's estimates start from."""

    prompts: int
    """Per step, over all workers."""
    prompt_tokens: int
    """Of one prompt."""
    response_tokens: int
    """Of one response."""
    token_bytes: int | None = None
    """Of the text of one token; None, and columns of text have no known bound."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Bytes per row of other columns, by name."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Bytes of all rows that a node makes, by node: of weights, the model's size."""
    pieces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """How many rows it makes in all, the same number on each worker, and the bytes of the largest; by node."""
    part: int | None = None
    """Bytes at most of what moves at once of a table that moves in parts; a row that is larger moves alone."""
    buffers: bool = False
    """What a broadcast can bring goes by one, through buffers in a worker's own memory."""
    minibatches: int = 1
    quadratic_from: int = 0
    """Tokens from which balancing counts a row's attention as well; 0, not at all."""


@dataclass(frozen=True, slots=True)
class Width:
    """Bytes of one row, at most: ``fixed``, and ``bits`` of each of up to ``tokens`` tokens."""

    fixed: int
    bits: int = 0
    tokens: int = 0

    @property
    def bytes(self) -> int:
        return self.fixed + -(-self.tokens * self.bits // 8)


def width_of(name: str, kind: DataType, sizes: Sizes, longest_worker: int) -> Width | None:
    """None when nothing bounds the column. ``longest_worker``: bytes of the longest name of a worker."""
    if name in sizes.widths:
        return Width(sizes.widths[name])
    try:
        return Width((int(kind.bit_width) + 7) // 8)
    except ValueError:  # not a type of fixed width
        pass
    tokens = {PROMPT_IDS: sizes.prompt_tokens, **dict.fromkeys(_OF_RESPONSES, sizes.response_tokens)}
    if name in tokens:
        return Width(_OFFSET, int(kind.value_type.bit_width), tokens[name])
    texts = {PROMPT_TEXT: sizes.prompt_tokens, RESPONSE: sizes.response_tokens}
    if name in texts and sizes.token_bytes is not None:
        return Width(_OFFSET, 8 * sizes.token_bytes, texts[name])
    words = {FINISH_REASON: _FINISH_REASONS, WORKER: longest_worker}
    return Width(_OFFSET + words[name]) if name in words else None
