"""How far back a layer lets a token see, found out without the masks that transformers makes for
its own attention.

Most families hand a layer's window to its attention; of a few, such as PhiMoE, only the mask knows
it. transformers builds masks by the name of the attention, so a model is run once under a name for
which a mask is a Span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

_WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "local_attention",
    "attention_window_size",
    "chunk_size",
)
"""Names in configs of the tokens that a layer sees, or computes at a time."""
_LONG = 70  # more than the 64 tokens of a chunk of linear attention
# of which a longer row is tried: all windows take the same code, and long rows take time
_MOST_IN_WINDOW = 256
EAGER = "eager"
"""Name of the attention of transformers that has all that a family needs, and takes a matrix of
scores for it."""
_WINDOW = "siirl_window"  # attribute of a module, once its window has been found out


def trial_length(config: Any) -> int:
    """Return the tokens of a row that is longer than the windows and chunks of a model with this
    config, of its text part, but for very wide ones.
    """
    windows = [getattr(config, name, None) for name in _WINDOWS]
    known = [window for window in windows if isinstance(window, int) and window <= _MOST_IN_WINDOW]
    return max([_LONG, *(window + 2 for window in known)])


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Stands for a mask: a token sees itself and those before it in its row, no further back
    than a window.
    """

    window: int | None
    """Tokens, the token itself included; None: all."""


def register_with_probe(name: str, attend: Callable[..., tuple[Tensor, None]]) -> str:
    """Register an attention function in transformers, for which it makes no masks. Return the name
    of another, to be used in one pass before: it computes the same, and finds out the window of
    each layer for ``window_of``.

    That one raises NotImplementedError for a layer that attends in chunks or makes a mask of its
    own.
    """

    def attend_and_find_window(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None and not isinstance(attention_mask, AttentionSpan):
            raise NotImplementedError(f"{type(module).__name__} makes a mask of its own")
        if sliding_window is None and attention_mask is not None:
            vars(module)[_WINDOW] = attention_mask.window
        return attend(module, query, key, value, None, sliding_window=sliding_window, **others)

    probe = f"{name}_probe"
    AttentionInterface.register(name, attend)
    AttentionInterface.register(probe, attend_and_find_window)
    AttentionMaskInterface.register(probe, _span)
    return probe


def window_of(module: nn.Module, sliding_window: int | None) -> int | None:
    """Return the window of a layer, which it hands over as ``sliding_window`` or which was found
    out; None for none.
    """
    if sliding_window is not None:
        return sliding_window
    window: int | None = vars(module).get(_WINDOW)
    return window


def _span(
    *, config: Any, local_size: int | None = None, use_vmap: bool = False, **others: Any
) -> AttentionSpan:
    """Return the span of a mask that transformers asks for."""
    if use_vmap:
        raise NotImplementedError("it makes a mask of its own")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise NotImplementedError("it attends in chunks")
    return AttentionSpan(local_size)
