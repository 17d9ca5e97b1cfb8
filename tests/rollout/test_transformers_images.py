from pathlib import Path

import pytest

from siirl_dask.config import Config, Engine, ImagesConfig, ModelConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.images.features import image_features
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.rollout import GenerationRequest, Sampling, build_engine, check_engine
from siirl_dask.rollout.image_prompts import PromptImageReader
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.image_engines import ImageEngineTests, image_requests, serve
from tests.settings import rollout_config


class _WithImages(ImageEngineTests):
    @classmethod
    def make_engine(cls, folder: Path, processor: ImageProcessor) -> TransformersEngine:
        return TransformersEngine(ModelConfig(path=str(folder)), max_rows=50, processor=processor)

    def test_the_tower_runs_once_for_an_image(self, engine, requests, monkeypatch):
        seen = []

        def counted(model, pixels):
            seen.extend(pixels)
            return image_features(model, pixels)

        monkeypatch.setattr("siirl_dask.rollout.image_prompts.image_features", counted)
        shown = {image.key for request in requests for image in request.images}
        serve(engine, requests * 9)  # more rows than a batch has
        assert len(seen) == len(shown)
        serve(engine, requests)
        assert len(seen) == 2 * len(shown), "weights may be other ones by then"


class TestQwen2Vl(_WithImages):
    family = "qwen2_vl"
    seed = 4


class TestQwen25Vl(_WithImages):
    family = "qwen2_5_vl"


class TestQwen3Vl(_WithImages):
    family = "qwen3_vl"


def test_features_that_are_too_many_to_keep_are_dropped(tmp_path, monkeypatch):
    folder = tiny_vlm(tmp_path / "model", family="qwen3_vl")
    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    engine = TransformersEngine(ModelConfig(path=str(folder)), processor=processor)
    requests = image_requests(folder, processor, 6, Sampling(max_tokens=1))
    expected = serve(engine, requests)
    monkeypatch.setattr("siirl_dask.rollout.image_prompts._KEPT", 0)
    monkeypatch.setattr("siirl_dask.rollout.image_prompts._PATCHES", 1)
    reader = PromptImageReader(engine._model, processor)
    for request in requests[1:]:
        reader.read([request])
        assert len(reader._known) == len({image.key for image in request.images})
    again = serve(engine, requests)
    assert [sample.token_ids for sample in again] == [sample.token_ids for sample in expected]
    # images beside each other may change the last digit
    for sample, other in zip(again, expected, strict=True):
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_an_engine_without_images_generates_from_texts_alone(tmp_path):
    folder = tiny_vlm(tmp_path / "model")
    model, rollout = ModelConfig(path=str(folder)), rollout_config(engine=Engine.transformers)
    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    text, picture = image_requests(folder, processor, 2, Sampling(max_tokens=4))
    plain, seeing = (
        build_engine(
            Device("w0"), Rank(), model=model, rollout=rollout, images=ImagesConfig(column=column)
        )
        for column in (None, "images")
    )
    assert plain.processor is None
    assert serve(plain, [text]) == serve(seeing, [text])
    with pytest.raises(ConfigError, match=r"shows 1 image.* set images\.column"):
        serve(plain, [picture])


def test_a_text_model_is_refused_for_images_before_the_start_and_when_it_is_built(tmp_path):
    folder, images = tiny_model(tmp_path / "model"), ImagesConfig(column="images")
    model, rollout = ModelConfig(path=str(folder)), rollout_config(engine=Engine.transformers)
    options = {"model": model, "rollout": rollout, "images": images}
    with pytest.raises(ConfigError, match="sees no images"):
        build_engine(Device("w0"), Rank(), **options)
    with pytest.raises(ConfigError, match="sees no images"):
        check_engine(options, ["w0"], Config())
    assert check_engine({**options, "images": ImagesConfig()}, ["w0"], Config(images=images)).memory
    engine = build_engine(Device("w0"), Rank(), model=model, rollout=rollout, images=ImagesConfig())
    assert serve(engine, [GenerationRequest([1], 0, Sampling(max_tokens=1))])


def test_an_engine_that_would_take_the_places_of_images_for_text_is_refused_before_the_start(
    tmp_path,
):
    options = {
        "model": ModelConfig(path=str(tiny_vlm(tmp_path / "model"))),
        "rollout": rollout_config(),
    }
    run = Config(images=ImagesConfig(column="images"))
    with pytest.raises(ConfigError, match=r"is given no images.* give it images: \$\{images\}"):
        check_engine(options, ["w0"], run)
    for told in (ImagesConfig(), ImagesConfig(column="images")):
        assert check_engine({**options, "images": told}, ["w0"], run).memory
