"""What every RolloutEngine must do with weights that are announced; a part of EngineTests."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from siirl_dask.rollout import RolloutEngine, Sampling, WeightStream

_ROWS = ([[5, 6, 7], [8, 9]], [1, 2], Sampling(max_tokens=6))


class WeightStreamTests:
    """With the fixtures of EngineTests."""

    def test_announced_weights_are_loaded_as_they_come_and_let_go_of(
        self, engine: RolloutEngine, model: PreTrainedModel, other_model: PreTrainedModel
    ) -> None:
        memory: dict[str, weakref.ref[object]] = {}

        def coming() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in other_model.named_parameters():
                values = np.array(parameter.detach().numpy())
                memory[name] = weakref.ref(values)
                yield name, torch.from_numpy(values)
                del values
                gc.collect()
                assert sum(there() is not None for there in memory.values()) < len(shapes) / 2

        shapes = {name: parameter.shape for name, parameter in other_model.named_parameters()}
        engine.load_weights(WeightStream(shapes, coming()), 1)
        assert len(memory) == len(shapes)
        assert engine.version == 1
        given = engine.generate(*_ROWS)
        engine.load_weights(model.named_parameters(), 2)
        assert engine.generate(*_ROWS) != given
        engine.load_weights(other_model.named_parameters(), 3)
        assert engine.generate(*_ROWS) == given

    @pytest.mark.parametrize("wrong", ["missing", "unknown", "misshaped"])
    def test_announced_weights_that_do_not_fit_are_refused_before_any_comes(
        self, engine: RolloutEngine, model: PreTrainedModel, wrong: str
    ) -> None:
        def coming() -> Iterator[tuple[str, Tensor]]:
            pytest.fail("they were asked for")
            yield

        version, name = engine.version, "model.norm.weight"
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if wrong == "missing":
            del shapes[name]
        elif wrong == "unknown":
            name = "model.unheard_of.weight"
            shapes[name] = (3,)
        else:
            shapes[name] = (3,)
        with pytest.raises(ValueError, match=name):
            engine.load_weights(WeightStream(shapes, coming()), 4)
        assert engine.version == version
