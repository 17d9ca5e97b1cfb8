"""TensorBoard reads back the scalars that were written."""

from __future__ import annotations

import sys

import pytest

from siirl_dask.errors import ConfigError
from siirl_dask.observe import Record, TensorBoardLog


def test_scalars_come_back_with_validation_apart(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(f"file://{tmp_path}/run")
    log.write(Record(step=3, phase="train", seconds=1.0, metrics={"reward/mean": 0.5, "policy/kl": None}))
    log.write(Record(step=3, phase="validation", seconds=1.0, metrics={"reward/mean": 0.75}))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()  # before close: each record is flushed
    log.close()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "validation/reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("validation/reward/mean")] == [(3, 0.75)]


def test_a_missing_tensorboard_names_the_config_key_and_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"observe\.tensorboard=true.*siirl_dask\[tensorboard\]"):
        TensorBoardLog(str(tmp_path))
