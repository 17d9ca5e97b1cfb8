"""A run of TRL's GRPOTrainer with a real model in this process.

python -m against_trl.real_trl SETTING CURVES.json    # SETTING: JSON
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory

from siirl_dask.models.broken_imports import hide

hide()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from real_model import sum_is_right  # noqa: E402

from .real_setting import RealSetting  # noqa: E402
from .run_trl import Notes, arguments, train  # noqa: E402
from .setting import Curves, answer_to, prompts_in_order  # noqa: E402


def run_trl(setting: RealSetting) -> Curves:
    torch.set_num_threads(setting.cores)
    notes = Notes()
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(setting.task.model),
            reward_funcs=score,
            args=arguments(setting, folder),
            train_dataset=Dataset.from_list(prompts_in_order(setting)),
            callbacks=[notes],
        )
        train(trainer, setting)
    return Curves(rewards=notes.rewards, entropy=notes.entropy, ends=notes.ends, accuracy=[])


def score(completions: Sequence[Sequence[Mapping[str, str]]], answer: Sequence[str], **others: object) -> list[float]:
    """Return 1 where the last number of a message is the sum, else 0."""
    return [sum_is_right(None, given[-1]["content"], wanted) for given, wanted in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    answer_to(sys.argv[1:], run_trl, RealSetting)
