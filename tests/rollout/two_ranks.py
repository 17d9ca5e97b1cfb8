"""Tests of an engine of two ranks; test_vllm_tensor_parallel.py runs them in both ranks, which
call alike.
"""

import time
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from siirl_dask.config import Engine, ImagesConfig, ModelConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.rollout import Generation, GenerationRequest, LocalQueue, Sampling
from siirl_dask.rollout.vllm_engine.engine import VllmEngine
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.image_engines import image_requests, serve
from siirl_dask.testing.in_flight import ScriptedWeights
from siirl_dask.testing.reference_model import PROMPTS, assert_agrees_with_trainer, load_model
from tests.settings import rollout_config


def place():
    return Rank(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, dist.group.WORLD)


def engine_of(folder, size=2, processor=None, **settings):
    rollout = {
        "engine": Engine.vllm,
        "max_rows": 25,
        "kv_cache_memory": "64MiB",
        "tensor_parallel_size": size,
    }
    rank = place()
    return VllmEngine(
        ModelConfig(path=str(folder)),
        rollout_config(**{**rollout, **settings}),
        Device(f"w{rank.rank}"),
        rank,
        processor=processor,
    )


@contextmanager
def running(folder, size=2, **settings):
    world, threads = dist.group.WORLD, torch.get_num_threads()
    engine = engine_of(folder, size, **settings)
    try:
        yield engine
    finally:
        engine.close()
    assert dist.group.WORLD is world
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.getbasetemp().parent


def test_a_model_that_two_ranks_cannot_share_fails_on_both(models):
    with pytest.raises(
        ConfigError, match=r"model\.path=.*vLLM cannot run it.*heads \(3\) must be divisible"
    ):
        engine_of(models / "odd")


@pytest.fixture
def shared_files(monkeypatch):
    """Sizes of the files in shared memory that are made or opened, in bytes."""
    sizes = []
    usual = SharedMemory.__init__

    def note(self, name=None, create=False, size=0, **more):
        usual(self, name, create, size, **more)
        sizes.append(self.size)

    monkeypatch.setattr(SharedMemory, "__init__", note)
    return sizes


def test_a_rank_without_memory_ends_the_start_of_both_with_its_reason(models, shared_files):
    """The other one waits for it, and would else say that its peer is gone. Nor has a start queues in
    shared memory, of megabytes, which would stay there where it is killed.
    """
    began = time.monotonic()
    size = ("64MiB", "200TiB")[place().rank]
    with pytest.raises(ConfigError, match=r"vLLM cannot run it.*memory") as ended:
        engine_of(models / "tied", kv_cache_memory=size)
    assert time.monotonic() - began < 120
    assert ("rank 1 of 2: " in str(ended.value)) == (place().rank == 0)
    assert max(shared_files, default=0) < 2**16


class TestTwoRanks(EngineTests):
    @classmethod
    def make_engine(cls, folder):
        return engine_of(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, models):
        return models / "tied"

    @pytest.fixture(scope="class")
    @classmethod
    def other_model(cls, models):
        return load_model(models / "other")

    def test_logprobs_equal_the_trainers_before_and_after_updates(self, engine, folder):
        assert_agrees_with_trainer(engine, folder, after=(0, 1))


def test_two_ranks_sample_from_images_as_one_rank_does(models):
    """The pictures of both ranks' rows travel to both; of one rank's prompts some show none."""
    folder, mine = models / "vlm", place().rank
    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    requests = image_requests(folder, processor, 12, Sampling(max_tokens=8))[mine::2]
    given = []
    for size in (2, 1):
        with running(folder, size, processor=processor) as engine:
            given.append(serve(engine, requests))
    assert [sample.token_ids for sample in given[0]] == [sample.token_ids for sample in given[1]]
    for one, other in zip(*given, strict=True):
        assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)


def test_each_rank_keeps_its_own_rows_as_one_rank_samples_them(models):
    """Ranks have different numbers of rows, one has none, and the cache is so small that rows
    are preempted.
    """
    folder, mine = models / "untied", place().rank
    rows = [[(mine + row + 3 * at) % 256 for at in range(120)] for row in range((6, 3)[mine])]
    calls = [
        (rows, Sampling(max_tokens=16, temperature=0.3)),
        (
            PROMPTS if mine else [],
            Sampling(max_tokens=12, temperature=0.1, top_k=20, top_p=0.9, min_p=0.01),
        ),
        (PROMPTS, Sampling(max_tokens=12, temperature=0.0)),
    ]
    given = []
    for size in (2, 1):
        with running(folder, size, kv_cache_memory="1MiB", enable_prefix_caching=False) as engine:
            given.append(
                [engine.generate(asked, [7 + mine] * len(asked), way) for asked, way in calls]
            )
            if size == 2:
                assert_agrees_with_trainer(engine, folder, after=(0, 1))
    for together, alone in zip(*given, strict=True):
        assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
        for one, other in zip(together, alone, strict=True):
            assert_close(
                torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0
            )


def test_ranks_take_new_weights_together_and_sample_as_one_rank_that_takes_them_then(models):
    """They arrive at different times."""
    folder, mine = models / "untied", place().rank
    model = load_model(models / "untied")
    doubled = load_model(models / "untied")
    with torch.no_grad():
        for weight in doubled.parameters():
            weight.mul_(1.5)
    requests = [
        GenerationRequest([(mine + 7 * row) % 256] * 3, 50 * mine + row, Sampling(max_tokens=limit))
        for row, limit in enumerate([(4, 30, 16), (24, 9)][mine] * 4)
    ]
    arrivals = [[(6, 7), (19, 8)], [(9, 7), (15, 8)]][mine]
    given = []
    for size, updates in ((2, arrivals), (1, [(9, 7), (19, 8)])):
        with running(folder, size) as engine:
            weights = ScriptedWeights(engine, {7: doubled, 8: model}, updates)
            queue = LocalQueue[GenerationRequest, Generation](requests)
            engine.serve_in_flight(queue, weights)
            assert engine.version == 8
            given.append(queue.results())
    spans = {tuple(dict.fromkeys(sample.versions)) for sample in given[0]}
    assert {(0, 7), (0, 7, 8)} <= spans
    for one, other in zip(*given, strict=True):
        assert (one.token_ids, one.versions) == (other.token_ids, other.versions)
        assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)
