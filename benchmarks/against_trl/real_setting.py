"""The sums of ``benchmarks/real_model.py`` with SmolLM2-135M-Instruct, for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from siirl_dask.tasks.sorting import Task

from .setting import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class RealSetting(Setting):
    """GRPO on chats. The numbers are those of benchmarks/real_model.yaml, with two workers, each
    on a core.
    """

    prompts: int = 8
    minibatches: int = 1
    lr: float = 1e-5
    warmup: int = 2
    max_prompt: int = 96
    max_response: int = 16
    told: bool = True
    workers: int = 2

    @property
    def task(self) -> Task:
        folder = Path(self.folder)
        validation = folder / "validation.parquet"
        return Task(folder / "model", folder / "train.parquet", validation, validation)
