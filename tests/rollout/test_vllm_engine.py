import json
import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.synchronize import SemLock
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from siirl_dask.config import Dtype, Engine, ModelConfig, Sampler
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout import GenerationRequest, LocalQueue, Sampling, build_engine
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.vllm_engine.engine import VllmEngine
from siirl_dask.rollout.vllm_engine.reloading import NewWeights
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.reference_model import PROMPTS, assert_agrees_with_trainer
from tests.settings import rollout_config
from tests.training import families

DEVICE = Device("w0")
SWEEP = pytest.mark.sweep


def rollout_of(**settings):
    return rollout_config(
        **{"engine": Engine.vllm, "max_rows": 50, "kv_cache_memory": "64MiB", **settings}
    )


@contextmanager
def running(folder, dtype=Dtype.float32, device=DEVICE, float32_head=False, **settings):
    model = ModelConfig(path=str(folder), dtype=dtype, float32_head=float32_head)
    engine = build_engine(device, Rank(), model=model, rollout=rollout_of(**settings))
    assert isinstance(engine, VllmEngine)
    try:
        yield engine
    finally:
        engine.close()


class TestVllmEngine(EngineTests):
    @classmethod
    def make_engine(cls, folder: Path) -> VllmEngine:
        return VllmEngine(ModelConfig(path=str(folder)), rollout_of(), DEVICE)

    def test_logprobs_equal_the_trainers_before_and_after_updates(self, engine, folder):
        assert_agrees_with_trainer(engine, folder, after=(0, 1, 5))

    def test_the_transformers_engine_samples_the_same_tokens(self, engine, folder):
        expected = TransformersEngine(ModelConfig(path=str(folder)))
        for sampling in (
            Sampling(max_tokens=12),
            Sampling(max_tokens=12, temperature=0.0),
            Sampling(max_tokens=12, temperature=0.1, top_k=20, top_p=0.9, min_p=0.01),
        ):
            given, wanted = (
                one.generate(PROMPTS, range(100, 106), sampling) for one in (engine, expected)
            )
            assert [sample.token_ids for sample in given] == [sample.token_ids for sample in wanted]

    def test_a_tied_head_may_arrive_under_either_name(self, engine, folder):
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
        before = engine.generate(PROMPTS, range(6), Sampling(max_tokens=4))
        engine.load_weights(weights.items(), 1)
        assert engine.generate(PROMPTS, range(6), Sampling(max_tokens=4)) == before

    def test_weights_that_are_not_finite_are_not_sampled_from(self, engine, folder):
        weights = {
            name: weight * float("nan")
            for name, weight in load_file(folder / "model.safetensors").items()
        }
        engine.load_weights(weights.items(), 5)
        for temperature in (0.0, 1.0):
            with pytest.raises(RunError, match="version 5"):
                engine.generate([[1, 2]], [0], Sampling(max_tokens=3, temperature=temperature))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("vllm") / "model", seed=1)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen3", False),
        ("qwen2", True),
        ("qwen3_moe", True),
        pytest.param("llama", True, marks=SWEEP),
        pytest.param("llama", False, marks=SWEEP),
    ],
)
def test_logprobs_equal_the_trainers_for_each_family(tmp_path, family, tied):
    folder = tiny_model(tmp_path / "model", seed=3, family=family, tied=tied)
    with running(folder) as engine:
        assert_agrees_with_trainer(engine, folder, after=(0, 1, 5))


@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss",
        "mixtral",
        *(pytest.param(name, marks=SWEEP) for name in ("glm4_moe", "gemma2", "granite")),
    ],
)
def test_logprobs_equal_the_trainers_after_updates_where_files_have_other_names_or_vllm_other_loaders(
    tmp_path, name, monkeypatch
):
    """Experts apart in files and together in the trainer; sinks and biases; biases that are
    buffers; soft caps.
    """
    # vLLM has no kernels for smaller heads on a CPU
    monkeypatch.setitem(families.SIZES, "hidden_size", 128)
    settings = {
        key: 64 if key == "moe_intermediate_size" else value
        for key, value in families.FAMILIES[name].settings.items()
    }
    monkeypatch.setitem(
        families.FAMILIES,
        name,
        replace(families.FAMILIES[name], settings=settings | {"head_dim": 32}),
    )
    families.written(tmp_path, name)
    with running(tmp_path) as engine:
        assert_agrees_with_trainer(engine, tmp_path, after=(0, 1))


def test_weights_that_vllm_leaves_as_they_were_end_the_run_by_name(folder, monkeypatch):
    """A loader that copies into a parameter itself does so into a tensor without memory, and
    vLLM only warns.
    """
    weights = load_file(folder / "model.safetensors")
    with running(folder) as engine:
        monkeypatch.setattr(NewWeights, "__iter__", without_mlp)
        with pytest.raises(RunError, match="version 1: it left out MergedColumnParallelLinear"):
            engine.load_weights(weights.items(), 1)
        with pytest.raises(RunError, match="failed to load weights before"):
            engine.load_weights(weights.items(), 2)


def without_mlp(weights):
    return (
        (name, tensor)
        for name, tensor in weights._weights
        if "gate_proj" not in name and "up_proj" not in name
    )


def test_preempted_rows_get_the_same_tokens_and_a_full_cache_is_told(folder):
    """16 rows begin in a cache of 16 blocks of 128 tokens, and then need two blocks each."""
    told = []
    device = replace(DEVICE, engine_cache=lambda used, waiting: told.append((used, waiting)))
    prompts = [[(row + 3 * place) % 256 for place in range(120)] for row in range(20)]
    sampling = Sampling(max_tokens=16, temperature=0.3)  # the ninth is the first of a second block
    settings = {"kv_cache_memory": "1MiB", "enable_prefix_caching": False, "max_num_seqs": 20}
    with running(folder, device=device, **settings) as engine:
        crowded = engine.generate(prompts, range(20), sampling)
        alone = [engine.generate([prompts[row]], [row], sampling)[0] for row in range(20)]
    assert [sample.token_ids for sample in crowded] == [sample.token_ids for sample in alone]
    assert max(used for used, _ in told) > 0.9
    assert max(waiting for _, waiting in told) >= 4
    assert told[-1] == (0, 0), "nothing is under way at the end"


def test_vllms_own_sampler_reports_the_log_probs_that_are_trained(folder):
    """With a seed for each row, and other random numbers for what goes on with a response."""
    sampling = Sampling(max_tokens=8, temperature=0.7)
    with running(folder, sampler=Sampler.vllm, temperature=0.7) as engine:
        samples = engine.generate(PROMPTS, range(6), sampling)
        assert samples == engine.generate(PROMPTS, range(6), sampling)
        queue = LocalQueue([GenerationRequest([5, 6], 3, sampling, begun) for begun in (0, 0, 1)])
        engine.serve(queue)
        first, again, later = (sample.token_ids for sample in queue.results())
        assert first == again != later
        with pytest.raises(
            ConfigError, match=r"sampler=vllm: a request asks for temperature=0[.]7, top_p=0[.]9"
        ):
            engine.generate(PROMPTS, range(6), replace(sampling, top_p=0.9))
        assert_agrees_with_trainer(engine, folder, after=(0, 1))


def test_calls_may_differ_in_sampling_parameters(folder):
    settings = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "engine_kwargs": {"max_model_len": 400, "seed": 7},
    }
    plain = TransformersEngine(ModelConfig(path=str(folder)))
    with running(folder, **settings) as engine:
        for seed in (1, 2):
            for sampling in (Sampling(max_tokens=5), Sampling(max_tokens=3, temperature=0.2)):
                given, wanted = (
                    one.generate(PROMPTS, [seed] * 6, sampling) for one in (engine, plain)
                )
                assert [sample.token_ids for sample in given] == [
                    sample.token_ids for sample in wanted
                ]
        with pytest.raises(
            ConfigError, match=r"rollout\.max_response_length=200: with a prompt of 260 .* the 400 "
        ):
            engine.generate(PROMPTS, range(6), Sampling(max_tokens=200))


def test_auto_takes_vllm_and_the_process_stays_as_it_was(folder, caplog):
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    with (
        caplog.at_level("INFO", "siirl_dask.rollout"),
        running(folder, engine=Engine.auto) as engine,
    ):
        engine.generate([[1, 2]], [3], Sampling(max_tokens=2))
        engine.load_weights(
            TransformersEngine(ModelConfig(path=str(folder)))._model.named_parameters(), 1
        )
    assert [
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ] == states
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)
    assert not torch.distributed.is_initialized()
    assert "rollout.engine=auto takes vllm" in caplog.text


def test_a_worker_that_is_killed_leaves_no_name_of_a_lock_of_progress_bars(folder):
    """Python warned of two leaked semaphores at the end of each run that failed."""
    with running(folder):
        lock = tqdm.get_lock()
    assert not [each for each in (lock, *getattr(lock, "locks", ())) if isinstance(each, SemLock)]


@pytest.mark.slow
def test_bfloat16_generates_and_takes_float32_weights(folder):
    greedy = Sampling(max_tokens=1, temperature=0.0)
    exact = TransformersEngine(ModelConfig(path=str(folder)))
    with running(folder, Dtype.bfloat16) as engine:
        engine.load_weights(load_file(folder / "model.safetensors").items(), 1)
        given, expected = (
            one.generate([[1, 2, 3]], [0], greedy)[0].logprobs[0] for one in (engine, exact)
        )
    assert given == pytest.approx(expected, abs=0.07)


@pytest.mark.slow
def test_a_float32_head_gives_products_in_float32_before_and_after_new_weights(folder):
    weights = load_file(folder / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    states = torch.randn(3, head.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    with running(folder, Dtype.bfloat16, float32_head=True) as engine:
        for expected in (head, 2 * head):
            (logits,) = engine._llm.apply_model(lambda model: model.compute_logits(states))
            torch.testing.assert_close(
                logits, states.float() @ expected.bfloat16().float().T, atol=1e-5, rtol=1e-5
            )
            engine.load_weights([(name, 2 * weight) for name, weight in weights.items()], 1)


@pytest.mark.slow
def test_of_the_generation_config_only_end_tokens_count(tmp_path, folder):
    meddling = tiny_model(tmp_path / "model", seed=1)
    file = meddling / "generation_config.json"
    settings = json.loads(file.read_text())
    end = settings["eos_token_id"]
    meddled = {
        "do_sample": True,
        "temperature": 0.1,
        "top_k": 1,
        "repetition_penalty": 9.0,
        "min_new_tokens": 5,
    }
    file.write_text(json.dumps(settings | meddled | {"eos_token_id": [end, *range(100)]}))
    rows, sampling = ([[1, 2]] * 32, range(32)), Sampling(max_tokens=30)
    free = TransformersEngine(ModelConfig(path=str(folder))).generate(*rows, sampling)
    with running(meddling) as engine:
        samples = engine.generate(*rows, sampling)
    for sample, uncut in zip(samples, free, strict=True):
        ends = [token < 100 or token == end for token in sample.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (sample.finish_reason == "stop")
        assert sample.token_ids == uncut.token_ids[: len(ends)]


def test_a_model_that_cannot_run_is_one_error_and_another_runs_after(tmp_path, folder):
    odd = tiny_model(tmp_path / "odd", head_dim=8)
    with pytest.raises(ConfigError, match=r"model\.path=.*odd.*vLLM cannot run it.*head_dim=8"):
        VllmEngine(ModelConfig(path=str(odd)), rollout_of(), DEVICE)
    with running(folder) as engine:
        assert engine.generate([[1]], [1], Sampling(max_tokens=1))


@pytest.mark.slow
def test_a_second_engine_is_refused_until_the_first_is_gone(folder):
    model, rollout = ModelConfig(path=str(folder)), rollout_of()
    first = VllmEngine(model, rollout, DEVICE)
    with pytest.raises(ConfigError, match="one engine in a process"):
        VllmEngine(model, rollout, DEVICE)
    assert first.generate([[1]], [1], Sampling(max_tokens=1))
    del first
    said = []
    second = VllmEngine(
        model, rollout, replace(DEVICE, stage=lambda name: nullcontext(said.append(name)))
    )
    assert said == [
        "vLLM loads the weights",
        "vLLM compiles the model and measures its memory",
        "vLLM makes its cache",
        "vLLM compiles kernels and captures graphs",
    ]
    second.close()
    second.close()


def test_a_folder_with_missing_weights_is_refused(tmp_path):
    file = tiny_model(tmp_path / "model") / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        VllmEngine(ModelConfig(path=str(file.parent)), rollout_of(), DEVICE)


def test_folders_that_are_no_model_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path='.*nowhere': no such folder"):
        VllmEngine(ModelConfig(path=str(tmp_path / "nowhere")), rollout_of(), DEVICE)
    with pytest.raises(ConfigError, match=r"model\.path=.*transformers cannot load it"):
        VllmEngine(ModelConfig(path=str(tmp_path)), rollout_of(), DEVICE)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"engine_kwargs": {"max_model_length": 9}},
            r"\.max_model_length: .*did you mean 'max_model_len'",
        ),
        ({"engine_kwargs": {"dtype": "float16"}}, r"\.dtype: another key sets it"),
        ({"engine_kwargs": {"max_model_len": "many"}}, r"vLLM cannot run it"),
        (
            {"kv_cache_memory": "1MiB", "engine_kwargs": {"max_model_len": 100_000}},
            r"vLLM cannot run it with .*rollout\.vllm\.kv_cache_memory=1MiB",
        ),
    ],
)
def test_settings_that_vllm_does_not_take_are_named(folder, settings, text):
    with pytest.raises(ConfigError, match=text):
        VllmEngine(ModelConfig(path=str(folder)), rollout_of(**settings), DEVICE)
