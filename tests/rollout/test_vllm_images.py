import gc
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

import torch
from torch.testing import assert_close

from siirl_dask.config import Dtype, Engine, ImagesConfig, LoraConfig, ModelConfig
from siirl_dask.context import Device
from siirl_dask.errors import ConfigError
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.models.adapters import WEIGHT, A, B
from siirl_dask.rollout import Sampling
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.vllm_engine.adapter_choice import takes_layers
from siirl_dask.rollout.vllm_engine.engine import VllmEngine
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.image_engines import (
    ImageEngineTests,
    image_requests,
    load_image_model,
    response_logprobs,
    serve,
)
from tests.settings import rollout_config


def vllm_engine(folder, processor, lora=None, **settings):
    rollout = rollout_config(
        **{"engine": Engine.vllm, "max_rows": 50, "kv_cache_memory": "64MiB", **settings}
    )
    return VllmEngine(
        ModelConfig(path=str(folder)), rollout, Device("w0"), lora=lora, processor=processor
    )


class _WithImages(ImageEngineTests):
    @classmethod
    def make_engine(cls, folder: Path, processor: ImageProcessor) -> VllmEngine:
        return vllm_engine(folder, processor)

    def test_the_transformers_engine_samples_the_same_tokens(self, engine, folder, processor):
        expected = TransformersEngine(ModelConfig(path=str(folder)), processor=processor)
        requests = image_requests(folder, processor, 256, Sampling(max_tokens=8))
        given, wanted = (serve(one, requests) for one in (engine, expected))
        assert [sample.token_ids for sample in given] == [sample.token_ids for sample in wanted]
        pairs = zip(given, wanted, strict=True)
        assert (
            max(
                abs(a - b)
                for one, two in pairs
                for a, b in zip(one.logprobs, two.logprobs, strict=True)
            )
            < 1e-5
        )


@pytest.mark.slow
class TestQwen2Vl(_WithImages):
    family = "qwen2_vl"
    seed = 4


class TestQwen25Vl(_WithImages):
    family = "qwen2_5_vl"


class TestQwen3Vl(_WithImages):
    family = "qwen3_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vlm(tmp_path_factory.mktemp("vlm") / "model", family="qwen3_vl")


def test_a_model_that_could_see_images_generates_from_texts_alone(folder):
    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    requests = image_requests(folder, processor, 4, Sampling(max_tokens=4))
    engine = vllm_engine(folder, None)
    try:
        texts = [request for request in requests if not request.images]
        given, wanted = (
            serve(one, texts) for one in (engine, TransformersEngine(ModelConfig(path=str(folder))))
        )
        assert [sample.token_ids for sample in given] == [sample.token_ids for sample in wanted]
        with pytest.raises(ConfigError, match=r"shows 1 image.* set images\.column"):
            serve(engine, requests[1:2])
    finally:
        engine.close()
        gc.collect()


def test_vllms_own_layers_take_adapters_of_the_decoder_and_no_others(folder):
    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    requests = image_requests(folder, processor, 6, Sampling(max_tokens=6))
    lora, numbers = LoraConfig(rank=2, alpha=1), torch.Generator().manual_seed(7)
    engine = vllm_engine(folder, processor, lora, engine_kwargs={"enable_lora": True})
    try:
        for end, taken in (
            ("0.self_attn.q_proj.weight", True),
            ("blocks.0.attn.proj.weight", False),
        ):
            model, adapters = load_image_model(folder), {}
            (name,) = (name for name, _ in model.named_parameters() if name.endswith(end))
            weight, layer = model.get_parameter(name), name.removesuffix(WEIGHT)
            a, b = (
                torch.randn(size, generator=numbers) * 0.3
                for size in ((2, weight.shape[1]), (len(weight), 2))
            )
            adapters = {layer + A: a, layer + B: b}
            weight.data += 0.5 * b @ a
            if not taken:
                with pytest.raises(
                    ConfigError,
                    match=r"vLLM has no adapters for \['visual\.blocks\.0\.attn\.proj'\]",
                ):
                    engine.load_adapters(adapters.items(), 0.5, 2)
                continue
            engine.load_adapters(adapters.items(), 0.5, 1)
            for request, sample in zip(requests, serve(engine, requests), strict=True):
                expected = response_logprobs(model, processor, request, sample.token_ids)
                assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)
    finally:
        engine.close()
        gc.collect()


@pytest.mark.parametrize(
    ("targets", "merged"), [([], False), (["q_proj"], False), (["visual"], True)]
)
def test_adapters_in_the_tower_are_merged_on_an_accelerator(targets, merged):
    lora = LoraConfig(rank=8, targets=targets)
    assert (
        takes_layers(Dtype.bfloat16, rollout_config(engine=Engine.vllm), lora, on_cpu=False)
        is not merged
    )
