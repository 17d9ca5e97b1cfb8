"""The arithmetic of an engine's memory, held to what the sampler that every engine uses really
takes.
"""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from siirl_dask.config import Dtype, Engine
from siirl_dask.models.architecture import Architecture
from siirl_dask.models.shapes import ModelSize
from siirl_dask.rollout import engine_spec, memory
from siirl_dask.rollout.engine import Sampling
from siirl_dask.rollout.token_sampling import _DIGIT_PARTS, TokenSampler, _lowest_by_digits
from tests.settings import rollout_config


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that are there at once, views and what was there before aside."""

    def __init__(self, *before):
        super().__init__()
        self.there = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.there:
                self.there.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(tensor, self.free, storage.data_ptr(), storage.nbytes())
        return result

    def free(self, at, nbytes):
        self.there.discard(at)
        self.now -= nbytes


def engine(**vllm):
    architecture = Architecture(2, 64, 4, 2, 16, 128, 1000)
    return memory.EngineOnWorkers(
        size=ModelSize(10**6, 20, 10**5),
        architecture=architecture,
        rollout=rollout_config(engine=Engine.vllm, **vllm),
        dtype=Dtype.bfloat16,
        longest=100,
    )


def footprint(engine):
    return engine_spec(engine.rollout.engine).memory.on_accelerator(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_wait_in_the_hosts_memory_while_an_engine_sleeps_and_come_back_with_its_weights(
    level,
):
    one = footprint(engine(sleep_level=level))
    graphs = one.held["graphs"]
    assert one.resting == 0
    assert one.host["sleeping graphs"] == graphs
    assert one.moving == one.held["weights"] + graphs


def test_graphs_stay_where_an_engine_never_sleeps_and_are_nowhere_without():
    awake = footprint(engine(sleep_level=0))
    assert awake.resting == sum(awake.held.values())
    assert awake.host == {}
    eager = footprint(engine(enforce_eager=True))
    assert "graphs" not in eager.held
    assert "sleeping graphs" not in eager.host


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1),
        Sampling(max_tokens=1, temperature=0.7),
        Sampling(max_tokens=1, temperature=0),
        Sampling(max_tokens=1, top_p=0.9, top_k=50, min_p=0.01),
    ],
)
def test_drawing_takes_what_is_said_and_not_for_all_rows_at_once(monkeypatch, sampling):
    rows, vocabulary, part = 64, 5000, 4 * 5000 * 16  # a quarter of the rows at once
    monkeypatch.setattr(memory, "_CHUNK", dict.fromkeys((True, False), part))
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    with Peak(logits) as peak:
        TokenSampler(sampling)(logits, np.arange(rows, dtype=np.uint64), 3)
    assert part < peak.most < memory._CHUNK_COPIES * part


def test_looking_for_the_nucleus_by_digits_takes_no_more_than_is_said():
    """With the sampler's probabilities, another copy, it is within what is counted for a chunk."""
    logits = -torch.rand(16, 60_000, generator=torch.Generator().manual_seed(0))
    with Peak(logits) as peak:
        _lowest_by_digits(logits, torch.full((16, 1), 1000.0))
    assert peak.most <= (memory._CHUNK_COPIES - 1) * _DIGIT_PARTS * logits.nbytes
