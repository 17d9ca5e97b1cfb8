"""Where a module of transformers does not compute what its config says, and the engines that sample do."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def correct_modules(model: nn.Module) -> None:
    """Set a state-space layer's limits of time steps to those of its config.

    Nemotron-H's layers take ``time_step_min`` for the least, and only where they compute a whole row: one token after
    the other, as when sampling, transformers applies no limit, and neither does vLLM. Its ``time_step_limit`` is
    0 to infinity.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(module, "time_step_limit") and hasattr(config, "time_step_limit"):
            layer = cast(Any, module)
            layer.time_step_limit = tuple(layer.config.time_step_limit)
