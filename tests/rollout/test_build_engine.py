import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from siirl_dask.config import Config, Dtype, Engine, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout import Sampling, build_engine, check_engine
from siirl_dask.tasks.tiny_model import tiny_model
from tests.settings import rollout_config


def build(folder, dtype=Dtype.float32, **options):
    model = ModelConfig(path=str(folder), dtype=dtype)
    rollout = rollout_config(engine=Engine.transformers, **options)
    return build_engine(Device("w0"), Rank(), model=model, rollout=rollout)


def test_without_vllm_auto_takes_transformers_and_vllm_is_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    model = ModelConfig(path=str(tiny_model(tmp_path / "model")))
    with caplog.at_level("INFO", "siirl_dask.rollout"):
        engine = build_engine(Device("w0"), Rank(), model=model, rollout=RolloutConfig())
    assert type(engine).__name__ == "TransformersEngine"
    assert "rollout.engine=auto takes transformers" in caplog.text
    with pytest.raises(
        ConfigError, match=r"rollout\.engine=vllm: vLLM is not installed.*siirl_dask\[cpu\]"
    ):
        build_engine(Device("w0"), Rank(), model=model, rollout=RolloutConfig(engine=Engine.vllm))


def test_a_vllm_that_cannot_be_imported_is_one_clear_error(tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so: no such file')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from siirl_dask.config import ModelConfig, RolloutConfig\n"
        "from siirl_dask.context import Device, Rank\n"
        "from siirl_dask.rollout import build_engine\n"
        "build_engine(Device('w0'), Rank(), model=ModelConfig(path='model'), "
        "rollout=RolloutConfig())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "siirl_dask.errors.ConfigError: rollout.engine=auto: vLLM is installed and cannot be"
    )
    assert "libcudart.so" in last


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"gpu_memory_utilization": 0},
            "gpu_memory_utilization=0: expected more than 0, at most 1",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs=0: expected at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: expected at least 1"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory='lots': expected a number of bytes"),
        ({"kv_cache_memory": "9kB"}, "kv_cache_memory='9kB': expected at least 1MiB"),
        ({"engine_kwargs": {"kv_offloading_size": 4}}, "engine_kwargs.kv_offloading_size: vLLM"),
        (
            {"engine": Engine.transformers, "engine_kwargs": {"seed": 1}},
            "engine_kwargs.* rollout.engine is transformers",
        ),
    ],
)
def test_settings_that_no_engine_takes_are_refused_by_name(settings, text):
    with pytest.raises(ConfigError, match=rf"rollout\.vllm\.{text}"):
        rollout_config(**settings)


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, siirl_dask.rollout; print([m for m in ('torch', 'transformers') if m in "
        "sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "[]\n"
    )


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path='.*nowhere': no such folder"):
        build(tmp_path / "nowhere")


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=.*transformers cannot load it"):
        build(tmp_path)


def test_a_stop_token_outside_the_vocabulary_is_refused(tmp_path):
    folder = tiny_model(tmp_path / "model")
    build(folder, stop_token_ids=[263])

    def plan():
        rollout = rollout_config(engine=Engine.transformers, stop_token_ids=[7, 264])
        options = {"model": ModelConfig(path=str(folder)), "rollout": rollout}
        check_engine(options, ["w0"], Config())

    for refused in (plan, lambda: build(folder, stop_token_ids=[7, 264])):
        with pytest.raises(
            ConfigError,
            match=r"stop_token_ids=\[7, 264\]: the model in .* has 264 tokens and no 264",
        ):
            refused()


def test_a_folder_with_missing_weights_is_refused(tmp_path):
    file = tiny_model(tmp_path / "model") / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack \['model\.norm\.weight'\]"):
        build(file.parent)


def test_sampling_settings_of_the_generation_config_are_ignored(tmp_path):
    plain, meddling = tiny_model(tmp_path / "plain"), tiny_model(tmp_path / "meddling")
    file = meddling / "generation_config.json"
    meddled = {
        "do_sample": True,
        "temperature": 0.1,
        "top_k": 1,
        "repetition_penalty": 9.0,
        "min_new_tokens": 5,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | meddled))
    samples = [
        build(folder).generate([[1, 2]] * 8, list(range(8)), Sampling(max_tokens=6))
        for folder in (plain, meddling)
    ]
    assert samples[0] == samples[1]


def test_every_end_token_of_the_model_ends_a_sample(tmp_path):
    folder = tiny_model(tmp_path / "model")
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(
        json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *range(100)]})
    )
    for sample in build(folder).generate([[1, 2]] * 32, list(range(32)), Sampling(max_tokens=30)):
        ends = [token < 100 or token == settings["eos_token_id"] for token in sample.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (sample.finish_reason == "stop")


def test_bfloat16_generates_and_takes_float32_weights(tmp_path):
    folder = tiny_model(tmp_path / "model")
    engine, exact = build(folder, Dtype.bfloat16), build(folder)
    engine.load_weights(exact._model.named_parameters(), 1)
    greedy = Sampling(max_tokens=1, temperature=0.0)
    given, expected = (
        one.generate([[1, 2, 3]], [0], greedy)[0].logprobs[0] for one in (engine, exact)
    )
    assert given == pytest.approx(expected, abs=0.07)


def test_weights_that_are_not_finite_are_not_sampled_from(tmp_path):
    engine = build(tiny_model(tmp_path / "model"))
    engine.load_weights(
        ((name, weight * float("nan")) for name, weight in engine._model.named_parameters()), 5
    )
    for temperature in (0.0, 1.0):
        with pytest.raises(RunError, match="version 5"):
            engine.generate([[1, 2]], [0], Sampling(max_tokens=3, temperature=temperature))


def test_a_tied_head_may_arrive_under_either_name(tmp_path):
    folder = tiny_model(tmp_path / "model")
    engine = build(folder)
    weights = dict(engine._model.named_parameters())
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    engine.load_weights(weights.items(), 1)
    assert engine.version == 1


def test_messages_need_a_chat_template(tmp_path):
    with pytest.raises(ConfigError, match="no chat template"):
        build(tiny_model(tmp_path / "model")).tokenizer.encode([{"role": "user", "content": "hi"}])
