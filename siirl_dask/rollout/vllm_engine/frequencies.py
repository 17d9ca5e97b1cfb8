"""Rotary frequencies that follow the longest row (models/longest_row.py), which vLLM decides in its
own way.

vLLM decides once: by its ``max_model_len`` for ``longrope``, and never for ``dynamic``, whose
frequencies it computes for the original context.
"""

from __future__ import annotations

from siirl_dask.config import ModelConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.longest_row import DYNAMIC, following


def check_engine_length(model: ModelConfig, length: int) -> None:
    """Raise ConfigError for a ``max_model_len`` of the user's with which vLLM takes other
    frequencies than the trainer.
    """
    for found in following(model.path):
        if model.longest_row is None:
            continue
        if (length > found.limit) != (model.longest_row > found.limit):
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.max_model_len={length}: {found.subject(model)}, and "
                "vLLM goes by max_model_len; the trainer has "
                f"model.longest_row={model.longest_row}, which is on the other side of "
                f"{found.limit}: leave max_model_len out"
            )


def engine_length(model: ModelConfig) -> int | None:
    """Return the ``max_model_len`` with which vLLM takes the trainer's frequencies; None where
    any will do.
    """
    kinds = {found.kind for found in following(model.path)}
    return model.longest_row if kinds - {DYNAMIC} else None
