"""A penalty on rewards of responses that approach the length limit."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(
    lengths: Tensor,
    *,
    max_length: int,
    buffer: int,
    factor: float = 1.0,
) -> Tensor:
    """Return DAPO's soft overlong penalty (arXiv:2503.14476): 0 up to ``max_length - buffer``
    tokens, then falling in a line to ``-factor`` at ``max_length`` and beyond. [R] int64 -> [R]
    float32.

    ValueError when ``buffer`` is not in 1..``max_length``.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer}: expected 1 to max_length={max_length} tokens")
    beyond = lengths - (max_length - buffer)
    return -factor * (beyond.float() / buffer).clamp(0, 1)
