"""Conformance tests of a Trainer's state, which TrainerTests inherit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from siirl_dask.algorithms import ppo_clip
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import (
    LENGTHS,
    assert_same_tensors,
    batch_of,
    copied_weights,
    flat,
    load_state,
    random_rows,
    save_state,
)
from siirl_dask.training import Trainer
from siirl_dask.training.parallel.dtensor import full_tensor

PPO = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
"""The loss of most tests."""


class TrainerStateTests:
    """Tests of ``state`` and ``load_state``. They use the fixtures of TrainerTests."""

    def build(self, folder: Path, **settings: Any) -> Trainer:
        """Return a trainer of the model in ``folder``, with these settings of ``trainer``."""
        raise NotImplementedError

    def test_training_resumes_from_a_checkpoint_bit_for_bit(
        self, folder: Path, tmp_path: Path
    ) -> None:
        settings: dict[str, Any] = {
            "schedule": "cosine",
            "total_steps": 9,
            "warmup_steps": 1,
            "ema_decay": 0.5,
        }
        steady = self.build(folder, **settings)
        stopped = self.build(folder, **settings)
        assert _steps(steady, 0, 2) == _steps(stopped, 0, 2)
        save_state(stopped, tmp_path / "state")
        fresh = self.build(folder, **settings)
        load_state(fresh, tmp_path / "state")
        assert_same_tensors(copied_weights(fresh), copied_weights(stopped))
        assert _steps(steady, 2, 4) == _steps(fresh, 2, 4)
        assert_same_tensors(_full_state(fresh), _full_state(steady))

    def test_the_state_is_complete_before_the_first_update(self, folder: Path) -> None:
        state = self.build(folder).state()
        names = [name for name, _ in self.build(folder).weights()]
        assert list(state["model"]) == list(state["optimizer"]) == names
        for name, weight in state["model"].items():
            assert weight.dtype == torch.float32
            moments = {key: value.shape for key, value in state["optimizer"][name].items()}
            assert moments == {"step": (), "exp_avg": weight.shape, "exp_avg_sq": weight.shape}

    def test_the_state_of_another_model_is_refused(self, folder: Path, tmp_path: Path) -> None:
        other = self.build(tiny_model(tmp_path / "other", hidden=32)).state()
        with pytest.raises(ValueError, match="expected"):
            self.build(folder).load_state(other)


def _steps(trainer: Trainer, first: int, last: int) -> list[dict[str, float]]:
    """Take the updates ``first`` to ``last``, each on other rows. Returns their metrics."""
    return [
        trainer.update([batch_of(trainer, random_rows(LENGTHS[at:]))], PPO)
        for at in range(first, last)
    ]


def _full_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return the full tensors of the state by their path."""
    return {name: full_tensor(tensor) for name, tensor in flat(trainer.state()).items()}
