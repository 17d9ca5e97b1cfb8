"""One engine for several agents: each samples as an engine of its own would, whoever acted
before.
"""

import pytest

pytest.importorskip("peft", reason="peft is not installed: the extra lora brings it")

import torch

from siirl_dask.config import Engine, LoraConfig, ModelConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import PROMPTS
from tests.settings import rollout_config

AGENTS = ("a", "b", "c")
SAMPLING = Sampling(max_tokens=8)
KINDS = {
    "transformers": {"engine": Engine.transformers},
    "vllm, merged": {"engine": Engine.vllm, "kv_cache_memory": "64MiB"},
    "vllm, layers": {
        "engine": Engine.vllm,
        "kv_cache_memory": "64MiB",
        "engine_kwargs": {"enable_lora": True},
    },
    "transformers, in a process": {"engine": Engine.transformers, "process": True},
    "vllm, layers, in a process": {
        "engine": Engine.vllm,
        "process": True,
        "kv_cache_memory": "64MiB",
        "engine_kwargs": {"enable_lora": True},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("shared") / "model", seed=1)


def build(folder, device, agent="", base=(), **rollout):
    settings = {"max_rows": 8} | rollout
    model, lora = ModelConfig(path=str(folder)), LoraConfig(rank=2)
    return build_engine(
        device,
        Rank(),
        model=model,
        rollout=rollout_config(**settings),
        lora=lora,
        agent=agent,
        base=base,
    )


def adapters(seed):
    """Adapters that change what is sampled; each seed gives others."""
    generator = torch.Generator().manual_seed(seed)
    for layer, width in (("self_attn.q_proj", 64), ("mlp.down_proj", 128)):
        name = f"model.layers.0.{layer}"
        yield f"{name}.lora_A.weight", torch.randn(2, width, generator=generator)
        yield f"{name}.lora_B.weight", torch.randn(64, 2, generator=generator)


def sampled(engine):
    return [sample.token_ids for sample in engine.generate(PROMPTS, range(len(PROMPTS)), SAMPLING)]


@pytest.fixture(scope="module")
def expected(folder):
    """An engine of one policy samples this: with the folder's weights, and with the adapters of
    two seeds.
    """
    engine = build(folder, Device("w"), engine=Engine.transformers)
    found = [sampled(engine)]
    for seed in (1, 2):
        engine.load_adapters(adapters(seed), 0.5, seed)
        found.append(sampled(engine))
    return found


def marks_of(kind):
    """The last kind has the engine of one and the process of another."""
    marks = {"transformers": (), "vllm, layers, in a process": pytest.mark.sweep}
    return marks.get(kind, pytest.mark.slow)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks_of(kind)) for kind in KINDS])
def test_each_agent_samples_with_its_own_adapters_whoever_acted_before(kind, folder, expected):
    if "vllm" in kind:
        pytest.importorskip(
            "vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it"
        )
    plain, first, second = expected
    device = Device("w")
    a, b, c = (build(folder, device, agent, AGENTS, **KINDS[kind]) for agent in AGENTS)
    try:
        assert [sampled(engine) for engine in (a, b)] == [plain, plain]
        a.load_adapters(adapters(1), 0.5, 1)
        assert [engine.version for engine in (a, b, c)] == [1, 0, 0]
        assert [sampled(engine) for engine in (a, b, a, c)] == [first, plain, first, plain]
        b.load_adapters(adapters(2), 0.5, 2)
        assert [sampled(engine) for engine in (b, a, c, b)] == [second, first, plain, second]
        a.load_adapters(adapters(2), 0.5, 3)
        assert [sampled(engine) for engine in (b, a)] == [second, second]
        assert a.version == 3
        a.sleep()
        a.load_adapters(adapters(1), 0.5, 4)
        b.sleep(weights_follow=True)
        assert [sampled(engine) for engine in (b, a)] == [second, first]
        with pytest.raises(
            ValueError, match=r"adapters of version 9 do not fit: .*lora_A.weight is missing"
        ):
            a.load_adapters(list(adapters(2))[1:], 1.0, 9)
        assert (a.version, sampled(a)) == (4, first)
        with pytest.raises(TypeError, match="takes adapters alone"):
            a.load_weights([], 1)
        a.close()
        b.close()
        assert sampled(c) == plain
    finally:
        c.close()


def test_an_engine_is_not_put_to_sleep_for_an_agent_that_has_it_as_well(folder):
    device, slept = Device("w"), []
    a, b = (build(folder, device, agent, ("a", "b"), engine=Engine.transformers) for agent in "ab")
    a.shared.engine.sleep = lambda **told: slept.append(told)
    resources = {"rollout_a": a, "rollout_b": b}
    Context(
        step=1, run_seed=0, rank=Rank(), device=device, resource=a, resources=resources
    ).free_device()
    assert not slept
    Context(
        step=1, run_seed=0, rank=Rank(), device=device, resource=None, resources=resources
    ).free_device()
    assert slept
