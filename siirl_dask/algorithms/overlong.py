"""What is taken off a reward."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """0 up to ``max_length - buffer`` tokens, from there a line down to ``-factor`` at ``max_length`` and beyond (DAPO,
    arXiv:2503.14476). [R] -> [R] float32. ValueError when ``buffer`` is not in 1..``max_length``.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer}: expected 1 to max_length={max_length} tokens")
    beyond = lengths - (max_length - buffer)
    return -factor * (beyond.float() / buffer).clamp(0, 1)
