"""Engines record the experts that each token goes to, and a trainer that replays them agrees
with the engine.
"""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from siirl_dask.config import Config, Dtype, Engine, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models.routing import Routing, read_routing
from siirl_dask.rollout import GenerationRequest, LocalQueue, Sampling, build_engine, check_engine
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import PROMPTS, load_model, pack_samples
from siirl_dask.training import build_trainer
from tests.settings import rollout_config

VLLM = pytest.param(
    Engine.vllm,
    marks=pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: extra cpu"),
)
ENGINES = [Engine.transformers, VLLM]
LONG = [
    [(3 * place) % 251 for place in range(300)]
] * 3  # in vLLM two blocks of 128 tokens are read from the cache
MORE = [[(7 * row + 3 * place * place) % 251 for place in range(20)] for row in range(40)]
SAMPLING = Sampling(max_tokens=9)
WIDTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), seed=2, family="qwen3_moe", tied=False)


@pytest.fixture
def engine_of(folder):
    built = []

    def build(engine, dtype=Dtype.float32, **settings):
        if engine is Engine.vllm:
            settings = {"kv_cache_memory": "64MiB", **settings}
        rollout = rollout_config(engine=engine, router_replay=True, **settings)
        built.append(
            build_engine(
                Device("w0"),
                Rank(),
                model=ModelConfig(path=str(folder), dtype=dtype),
                rollout=rollout,
            )
        )
        return built[-1]

    yield build
    for engine in built:
        engine.close()


def routes_of(sample):
    return torch.tensor(np.frombuffer(sample.routes, np.uint8).astype(np.int64)).view(-1, WIDTH)


def assert_routes_are_the_models(folder, prompts, samples):
    """A plain pass of transformers over each row but its last token chooses the same experts."""
    model, seen = load_model(folder), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *given: seen.append(given[2][2]))
    for prompt, sample in zip(prompts, samples, strict=True):
        seen.clear()
        model(torch.tensor([[*prompt, *sample.token_ids[:-1]]]))
        assert torch.equal(routes_of(sample), torch.cat(seen, dim=1))


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_have_the_routes_of_all_tokens_but_the_last(folder, engine_of, engine):
    built = engine_of(engine, max_rows=5)
    assert built.routing == Routing((0, 1), 4, 2)
    prompts = [*PROMPTS, *LONG]
    for _ in range(2):  # the second time vLLM has prompts in its cache
        samples = built.generate(prompts, range(len(prompts)), SAMPLING)
        assert_routes_are_the_models(folder, prompts, samples)
    limits = [
        GenerationRequest(prompt, 7, Sampling(max_tokens=at + 1))
        for at, prompt in enumerate(PROMPTS)
    ]
    built.serve(queue := LocalQueue(limits))
    assert [len(sample.token_ids) for sample in queue.results()] == [1, 2, 3, 4, 5, 6]
    assert_routes_are_the_models(folder, PROMPTS, queue.results())


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: extra cpu")
def test_prompts_in_chunks_and_preempted_rows_have_their_routes_in_vllm(folder, engine_of):
    """16 rows begin in a cache of 16 blocks of 128 tokens, and then need two blocks each."""
    prompts = [[(row + 3 * place) % 256 for place in range(120)] for row in range(20)]
    built = engine_of(
        Engine.vllm, kv_cache_memory="1MiB", max_num_seqs=20, max_num_batched_tokens=100
    )
    assert_routes_are_the_models(
        folder, prompts, built.generate(prompts, range(20), Sampling(max_tokens=16))
    )
    weights = {
        name: weight.flip(0) if "mlp.gate" in name else weight
        for name, weight in load_model(folder).state_dict().items()
    }
    before = built.generate(LONG, range(3), SAMPLING)
    built.load_weights(weights.items(), 1)
    after = built.generate(LONG, range(3), SAMPLING)
    first = routes_of(after[0])[:300, :2]
    assert torch.equal(first, 3 - routes_of(before[0])[:300, :2]), (
        "routes of earlier weights were read from the cache"
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(Dtype.float32, 1e-4), (Dtype.bfloat16, 5e-3)])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_and_trainer_agree_with_replay(folder, engine_of, engine, dtype, tolerance):
    """Whether engine and trainer choose other experts in bfloat16, where nothing is replayed, is up
    to the processor.

    That the trainer goes by the engine's choices is seen by giving it others.
    """
    prompts, built = [*PROMPTS, *LONG, *MORE], engine_of(engine, dtype)
    samples = built.generate(prompts, range(len(prompts)), Sampling(max_tokens=40))
    last = torch.full((1, WIDTH), -1)
    routes = torch.cat([part for sample in samples for part in (routes_of(sample), last)]).to(
        torch.int16
    )
    rows = replace(pack_samples(prompts, samples), routes=routes)
    sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    off = {}
    for replay in (True, False):
        trainer = build_trainer(
            Device("w0"), Rank(), model=ModelConfig(path=str(folder), dtype=dtype),
            trainer=TrainerConfig(), rollout=RolloutConfig(router_replay=replay),
        )  # fmt: skip
        off[replay] = float((trainer.logprobs(rows).logprobs - sampled).abs().max())
        if replay:
            others = replace(rows, routes=torch.where(routes < 0, routes, (routes + 1) % 4))
            assert float((trainer.logprobs(others).logprobs - sampled).abs().max()) > 10 * tolerance
    assert off[True] <= tolerance
    assert off[False] <= tolerance or dtype is Dtype.bfloat16


def test_layers_without_experts_have_no_routes(tmp_path):
    folder = tiny_model(tmp_path / "model", family="qwen3_moe", layers=5)
    assert read_routing(str(folder)) == Routing((0, 1, 2, 3, 4), 4, 2)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"mlp_only_layers": []', '"mlp_only_layers": [3]').replace(
            '"decoder_sparse_step": 1', '"decoder_sparse_step": 2'
        )
    )
    assert read_routing(str(folder)) == Routing((1,), 4, 2)
    assert read_routing(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("experts", "named"), [(256, "2 layers of 256 experts"), (0, "0 layers of 0")]
)
def test_mixtures_without_a_byte_for_each_expert_are_refused(tmp_path, experts, named):
    folder = tiny_model(tmp_path / "model", family="qwen3_moe")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"num_local_experts": 4', f'"num_local_experts": {experts}')
    )
    with pytest.raises(ConfigError, match=f"rollout.router_replay=true: .* has {named}"):
        read_routing(str(folder))


def test_what_records_no_routes_is_refused_before_anything_starts(tmp_path, folder):
    dense = tiny_model(tmp_path / "dense")
    replay = RolloutConfig(router_replay=True)
    with pytest.raises(
        ConfigError, match=r"router_replay=true: model\.path=.*dense' is a qwen3, .* leave it out"
    ):
        check_engine({"model": ModelConfig(path=str(dense)), "rollout": replay}, ["w0"], Config())
    for settings, named in (
        ({"partial": True, "max_tokens_per_step": 128, "max_staleness": 1}, "partial=true"),
        ({"enforce_eager": False}, "vllm.enforce_eager=false"),
    ):
        with pytest.raises(ConfigError, match=f"router_replay=true with rollout.{named}"):
            rollout_config(router_replay=True, **settings)
