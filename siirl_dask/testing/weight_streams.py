"""Tests of engines that load a WeightStream; a part of EngineTests."""

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

_PROMPTS = [[5, 6, 7], [8, 9]]
_SEEDS = [1, 2]
_SAMPLING = Sampling(max_tokens=6)


class WeightStreamTests:
    """Tests of ``load_weights`` with a WeightStream. They use the fixtures of EngineTests."""

    def test_a_weight_stream_is_loaded_as_it_arrives_and_freed(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        other_model: PreTrainedModel,
    ) -> None:
        memory: dict[str, weakref.ref[object]] = {}

        def arriving() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in other_model.named_parameters():
                values = np.array(parameter.detach().numpy())
                memory[name] = weakref.ref(values)
                yield name, torch.from_numpy(values)
                del values
                gc.collect()
                assert sum(there() is not None for there in memory.values()) < len(shapes) / 2

        shapes = {name: parameter.shape for name, parameter in other_model.named_parameters()}
        engine.load_weights(WeightStream(shapes, arriving()), 1)
        assert len(memory) == len(shapes)
        assert engine.version == 1
        samples = engine.generate(_PROMPTS, _SEEDS, _SAMPLING)
        engine.load_weights(model.named_parameters(), 2)
        assert engine.generate(_PROMPTS, _SEEDS, _SAMPLING) != samples
        engine.load_weights(other_model.named_parameters(), 3)
        assert engine.generate(_PROMPTS, _SEEDS, _SAMPLING) == samples

    @pytest.mark.parametrize("wrong", ["missing", "unknown", "misshaped"])
    def test_a_weight_stream_that_does_not_fit_is_refused_at_once(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        wrong: str,
    ) -> None:
        def arriving() -> Iterator[tuple[str, Tensor]]:
            pytest.fail("a tensor was asked for")
            yield

        version = engine.version
        name = "model.norm.weight"
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if wrong == "missing":
            del shapes[name]
        elif wrong == "unknown":
            name = "model.unheard_of.weight"
            shapes[name] = (3,)
        else:
            shapes[name] = (3,)
        with pytest.raises(ValueError, match=name):
            engine.load_weights(WeightStream(shapes, arriving()), 4)
        assert engine.version == version
