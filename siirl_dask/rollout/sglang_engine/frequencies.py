"""Rotary frequencies that follow the longest row, which nothing pins in SGLang: see
models/longest_row.py.
"""

from __future__ import annotations

from siirl_dask.config import ModelConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.longest_row import following
from siirl_dask.rollout.specs import alternatives


def check_frequencies_of_sglang(model: ModelConfig) -> None:
    """Raise ConfigError for rows of SGLang beyond the original context, where it looks at the
    longest of a pass.
    """
    for found in following(model.path):
        if (model.longest_row or 0) > found.limit:
            raise ConfigError(
                f"rollout.engine=sglang: {found.subject(model)}, which no option of SGLang pins; "
                f"take {alternatives('sglang')}, or rows of at most that many tokens, prompt and "
                "response"
            )
