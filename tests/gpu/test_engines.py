"""Engines on a device: conformance, log-probs against the trainer's, weights from device to
device, sleep and wake.
"""

import gc
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from siirl_dask.config import Dtype, Engine, ModelConfig
from siirl_dask.context import DeviceKind, Rank
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.reference_model import PROMPTS, assert_agrees_with_trainer
from tests.gpu import devices
from tests.settings import rollout_config

pytestmark = pytest.mark.gpu
VLLM = pytest.mark.gpu(packages=["vllm"])
ENGINES = [Engine.transformers, pytest.param(Engine.vllm, marks=VLLM)]
TOLERANCE = {Dtype.float32: 1e-3, Dtype.bfloat16: 7e-2}


def build(folder, engine, dtype=Dtype.float32, **settings):
    rollout = rollout_config(
        engine=engine, max_rows=50, **{"kv_cache_memory": "256MiB", **settings}
    )
    return build_engine(
        devices.device(), Rank(), model=ModelConfig(path=str(folder), dtype=dtype), rollout=rollout
    )


@contextmanager
def running(folder, engine, dtype=Dtype.float32, **settings):
    built = build(folder, engine, dtype, **settings)
    try:
        yield built
    finally:
        built.close()
        gc.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("engine") / "model", seed=1, hidden=128, heads=4, kv_heads=2
    )


class TestTransformers(EngineTests):
    tolerance = TOLERANCE[Dtype.float32]

    @classmethod
    def make_engine(cls, folder: Path):
        return build(folder, Engine.transformers)


@VLLM
class TestVllm(EngineTests):
    tolerance = TOLERANCE[Dtype.float32]

    @classmethod
    def make_engine(cls, folder: Path):
        return build(folder, Engine.vllm)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_agrees_with_a_trainer_whose_weights_it_takes_on_the_device(
    folder, engine, dtype
):
    with running(folder, engine, dtype) as built:
        assert_agrees_with_trainer(
            built, folder, (0, 1, 5), devices.device(), dtype, TOLERANCE[dtype]
        )


def test_samples_by_graphs_are_those_of_the_loop_without(folder, tell):
    rows = [[*prompt] for prompt in PROMPTS for _ in range(5)]
    sampling = Sampling(max_tokens=400)
    with running(folder, Engine.transformers) as engine:
        graphs = engine._graphs
        if graphs is None:
            pytest.skip("no graphs on this device")
        found = [engine.generate(rows, range(len(rows)), sampling) for _ in range(2)]
        assert graphs.usable
        shapes = len(graphs._replays)
        engine._graphs = None
        expected = engine.generate(rows, range(len(rows)), sampling)
    tell(f"{shapes} graphs")
    assert found[0] == found[1]
    assert shapes > 1
    assert [sample.token_ids for sample in found[0]] == [sample.token_ids for sample in expected]


@VLLM
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_frees_the_device_and_wakes_as_it_was(folder, tell, level):
    sampling, cache = Sampling(max_tokens=6), 1 << 30
    with running(folder, Engine.vllm, sleep_level=level, kv_cache_memory="1GiB") as engine:
        before = engine.generate(PROMPTS, range(len(PROMPTS)), sampling)
        awake, freed = devices.memory()[0], []
        for version in (1, 2):
            engine.sleep(weights_follow=version == 2)
            freed.append(awake - devices.memory()[0])
            if version == 1:  # no others follow, so these stay, whatever the level
                assert engine.generate(PROMPTS, range(len(PROMPTS)), sampling) == before
                engine.sleep()
            engine.load_weights(weights(folder), version)
            assert engine.generate(PROMPTS, range(len(PROMPTS)), sampling) == before
        grown = devices.memory()[0] - awake
    shown = ", then ".join(f"{each / 2**20:.0f} MiB" for each in freed)
    tell(
        f"sleep at level {level} freed {shown} of the device, which has {grown / 2**20:+.0f} MiB "
        "after the last wake"
    )
    if devices.kind() is not DeviceKind.CPU:  # there all memory is the host's, and nothing sleeps
        assert min(freed) > 0.8 * cache
        assert grown < 0.2 * cache


def weights(folder):
    """The folder's weights, on the device, as a trainer gives them."""
    for name, weight in load_file(folder / "model.safetensors").items():
        yield name, weight.to(devices.device().torch_name)
