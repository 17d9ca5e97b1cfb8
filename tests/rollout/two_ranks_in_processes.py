"""Tests of a vLLM engine of two ranks with a process for each; test_vllm_tensor_parallel.py runs them in
both workers, which call alike.
"""

import os
import signal

import pytest
import torch.distributed as dist

from siirl_dask.config import Engine, ModelConfig
from siirl_dask.context import Device
from siirl_dask.rollout import build_engine
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.reference_model import load_model
from tests.memory_files import mapped_by, those_there
from tests.rollout.same_samples import assert_same_samples
from tests.rollout.test_process_engine import alive, of_group, other_weights, responses, rows
from tests.rollout.two_ranks import engine_of as engine_in_worker
from tests.rollout.two_ranks import models, place  # noqa: F401  # a fixture
from tests.settings import rollout_config


def engine_of(folder):
    rank = place()
    rollout = rollout_config(
        engine=Engine.vllm,
        process=True,
        max_rows=25,
        kv_cache_memory="64MiB",
        tensor_parallel_size=2,
    )
    model = ModelConfig(path=str(folder))
    return build_engine(Device(f"w{rank.rank}"), rank, model=model, rollout=rollout)


class TestTwoRanksInProcesses(EngineTests):
    @classmethod
    def make_engine(cls, folder):
        return engine_of(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, models):  # noqa: F811
        return models / "tied"

    @pytest.fixture(scope="class")
    @classmethod
    def other_model(cls, models):  # noqa: F811
        return load_model(models / "other")

    def test_rows_are_those_of_ranks_in_the_workers_to_the_bit_also_after_one_was_killed(
        self, engine, folder
    ):
        """The kill is while they generate, with weights that came after their start."""
        mine = place().rank
        requests = rows(60)[mine::2]
        weights = other_weights(folder)
        own = engine_in_worker(folder)
        expected = [responses(own, requests)]
        own.load_weights(weights.items(), 3)
        expected.append(responses(own, requests))
        own.close()
        assert expected[0] != expected[1], "other weights sample other rows"
        assert responses(engine, requests) == expected[0]
        engine.load_weights(weights.items(), 3)
        assert responses(engine, requests) == expected[1]
        lost = of_group(engine.pid)
        files = mapped_by(lost)
        delivered = []

        def note(number, _):
            delivered.append(number)
            if mine == 1 and len(delivered) == 7:
                os.kill(engine.pid, signal.SIGKILL)

        assert_same_samples(responses(engine, requests, note), expected[1])
        assert sorted(delivered) == list(range(30)), "each response is delivered once"
        assert engine.version == 3
        assert not alive(lost)
        dist.barrier()
        assert not those_there(files)
