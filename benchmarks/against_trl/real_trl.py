"""A run of TRL's GRPOTrainer with a real model in this process.

python -m against_trl.real_trl SETTING CURVES.json    # SETTING: JSON
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from siirl_dask.models.broken_imports import hide

hide()

from real_model import sum_is_right  # noqa: E402

from .real_setting import RealSetting  # noqa: E402
from .run_trl import run_trl  # noqa: E402
from .setting import answer_to  # noqa: E402


def score(
    completions: Sequence[Sequence[Mapping[str, str]]], answer: Sequence[str], **others: object
) -> list[float]:
    """Return 1 where the last number of a message is the sum, else 0."""
    return [
        sum_is_right(None, given[-1]["content"], wanted)
        for given, wanted in zip(completions, answer, strict=True)
    ]


if __name__ == "__main__":
    answer_to(sys.argv[1:], partial(run_trl, reward=score), RealSetting)
