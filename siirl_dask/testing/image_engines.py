"""The conformance suite of rollout engines that are given images: inherit it, and give it an engine
and a family.

    class TestMyEngine(ImageEngineTests):
        family = "qwen3_vl"

        @classmethod
        def make_engine(cls, folder: Path, processor: ImageProcessor) -> RolloutEngine:
            return MyEngine(folder, processor)

Text rows of such a model are as those of any other: ``EngineTests`` has their tests.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as pil
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText, PreTrainedModel

from siirl_dask.config import ImagesConfig
from siirl_dask.errors import DataError
from siirl_dask.images import Image
from siirl_dask.images.families import VlmFamily
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.models.adapters import WEIGHT, A, B
from siirl_dask.models.loading import no_progress_bars
from siirl_dask.rollout import (
    FinishReason,
    Generation,
    GenerationRequest,
    LocalQueue,
    RolloutEngine,
    Sampling,
    TakesAdapters,
)
from siirl_dask.rollout.tokenizer import load_tokenizer
from siirl_dask.tasks.tiny_vlm import tiny_vlm

_SHARP = 0.5
_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def picture(seed: int, width: int, height: int) -> Image:
    """Return a PNG of random cells."""
    cells = np.random.default_rng(seed).integers(
        0, 255, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8
    )
    file = io.BytesIO()
    pil.fromarray(cells.repeat(8, 0).repeat(8, 1)[:height, :width]).save(file, "PNG")
    return Image(file.getvalue())


def image_requests(
    folder: Path,
    processor: ImageProcessor,
    count: int,
    sampling: Sampling,
) -> list[GenerationRequest]:
    """Return requests of 0 to 2 images each, of several sizes, some of which are resized."""
    tokenizer = load_tokenizer(str(folder), "folder")
    numbers = random.Random(3)
    requests = []
    for row in range(count):
        shown = [
            picture(9 * row + each, *numbers.choices([16, 20, 24, 40], k=2))
            for each in range(row % 3)
        ]
        words = [
            str(numbers.randrange(10 ** numbers.randrange(1, 9))) for _ in range(len(shown) + 1)
        ]
        ids = tokenizer.encode(f"user: {_PICTURE.join(words)}\nassistant:")
        requests.append(
            GenerationRequest(processor.expand(ids, shown), row, sampling, images=tuple(shown))
        )
    return requests


def serve(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Return the responses to requests, in order."""
    queue = LocalQueue[GenerationRequest, Generation](requests)
    engine.serve(queue)
    return queue.results()


def load_image_model(folder: Path) -> PreTrainedModel:
    """Load an image-text model in float32, in evaluation mode."""
    with no_progress_bars():
        model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32
        )
    model.eval()
    return model


@torch.no_grad()
def response_logprobs(
    model: PreTrainedModel,
    processor: ImageProcessor,
    request: GenerationRequest,
    response: Sequence[int],
) -> Tensor:
    """Return the log-prob of each response token, by transformers alone: the prompt is read with
    its pixels, and then the response, whose tokens are text whatever they are. [len(response)].
    """
    prompt = torch.tensor([[*request.prompt]])
    pixels = [*map(processor.pixels, request.images)]
    shown = (
        {
            "pixel_values": torch.cat([each.values for each in pixels]),
            "image_grid_thw": torch.tensor([each.grid for each in pixels]),
            "mm_token_type_ids": (prompt == processor.image_token).int(),
        }
        if pixels
        else {}
    )
    model.model.rope_deltas = None  # of the row before
    read = model(input_ids=prompt, use_cache=True, **shown)
    rest = model(
        input_ids=torch.tensor([[*response]]),
        past_key_values=read.past_key_values,
        use_cache=True,
    )
    logits = torch.cat([read.logits[0, -1:], rest.logits[0, :-1]])
    heat = request.sampling.temperature
    if heat == 0:  # greedy sampling counts as temperature 1
        heat = 1.0
    return (logits / heat).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)


class ImageEngineTests:
    """Tests of an engine with images, which is built once per class."""

    family: VlmFamily
    seed = 1
    """Seed of the random weights; with few, a model hardly ever samples a placeholder, and a
    test wants some."""
    tolerance = 1e-5
    """Largest difference of log-probs from plain forward passes in float32, at temperature 1."""

    @classmethod
    def make_engine(cls, folder: Path, processor: ImageProcessor) -> RolloutEngine:
        """Build the engine to be tested, in float32, from a Hugging Face folder."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny model with random weights."""
        return tiny_vlm(
            tmp_path_factory.mktemp("engine") / "model", seed=cls.seed, family=cls.family
        )

    @pytest.fixture(scope="class")
    @classmethod
    def processor(cls, folder: Path) -> ImageProcessor:
        """The folder's processor of images."""
        return ImageProcessor.load(str(folder), ImagesConfig(column="images"))

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> PreTrainedModel:
        """The folder's model, for plain forward passes."""
        return load_image_model(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def other_model(cls, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
        """A model of the same shapes with other weights."""
        return load_image_model(
            tiny_vlm(tmp_path_factory.mktemp("engine") / "other", seed=2, family=cls.family)
        )

    @pytest.fixture(scope="class")
    @classmethod
    def built_engine(cls, folder: Path, processor: ImageProcessor) -> Iterator[RolloutEngine]:
        """The engine of the class, with whatever weights the last test left."""
        engine = cls.make_engine(folder, processor)
        yield engine
        engine.close()

    @pytest.fixture
    def engine(self, built_engine: RolloutEngine, model: PreTrainedModel) -> RolloutEngine:
        """The shared engine with the weights of the folder."""
        if built_engine.version != 0:
            built_engine.load_weights(model.named_parameters(), 0)
        return built_engine

    @pytest.fixture(scope="class")
    @classmethod
    def requests(cls, folder: Path, processor: ImageProcessor) -> list[GenerationRequest]:
        """Requests of no, one and two images."""
        return image_requests(folder, processor, 12, Sampling(max_tokens=6))

    def test_logprobs_are_those_of_plain_passes(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        processor: ImageProcessor,
        requests: list[GenerationRequest],
    ) -> None:
        self._assert_logprobs(model, processor, requests, serve(engine, requests))

    def test_a_sample_depends_on_its_images_and_not_on_the_rows_beside_it(
        self, engine: RolloutEngine, requests: list[GenerationRequest]
    ) -> None:
        sharp = [
            replace(request, sampling=Sampling(max_tokens=8, temperature=_SHARP))
            for request in requests
        ]
        together = serve(engine, sharp)
        self._assert_same(serve(engine, sharp[::-1])[::-1], together)
        self._assert_same([serve(engine, [request])[0] for request in sharp], together)
        others = [
            replace(request, images=tuple(_negative(image) for image in request.images))
            for request in sharp
            if request.images
        ]
        changed = serve(engine, others)
        shown = [sample for request, sample in zip(sharp, together, strict=True) if request.images]
        assert all(
            sample.logprobs[0] != other.logprobs[0]
            for sample, other in zip(shown, changed, strict=True)
        )

    def test_rows_of_one_prompt_and_rows_of_the_same_words_over_other_images_differ_as_alone(
        self, engine: RolloutEngine, requests: list[GenerationRequest]
    ) -> None:
        one = requests[1]
        two = replace(requests[1], images=(_negative(requests[1].images[0]),))
        rows = [replace(request, seed=seed) for seed in range(4) for request in (one, two)]
        self._assert_same(serve(engine, rows), [serve(engine, [row])[0] for row in rows])

    def test_an_image_token_that_is_sampled_is_an_ordinary_one(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        processor: ImageProcessor,
        requests: list[GenerationRequest],
    ) -> None:
        rows = [
            replace(request, seed=seed, sampling=Sampling(max_tokens=24))
            for seed in range(20)
            for request in requests
        ]
        drawn = [
            (row, sample)
            for row, sample in zip(rows, serve(engine, rows), strict=True)
            if processor.image_token in sample.token_ids[:-1]
        ]
        assert len(drawn) > 3
        self._assert_logprobs(
            model, processor, [row for row, _ in drawn], [sample for _, sample in drawn]
        )
        whole = serve(engine, [replace(row, sampling=Sampling(max_tokens=28)) for row, _ in drawn])
        for (row, sample), longer in zip(drawn, whole, strict=True):
            if sample.finish_reason is FinishReason.LENGTH:
                rest = replace(
                    row,
                    prompt=[*row.prompt, *sample.token_ids],
                    begun=len(sample.token_ids),
                    sampling=Sampling(max_tokens=4),
                )
                assert [*sample.token_ids, *serve(engine, [rest])[0].token_ids] == longer.token_ids

    def test_new_weights_are_used_for_images_that_were_seen_before(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        other_model: PreTrainedModel,
        processor: ImageProcessor,
        requests: list[GenerationRequest],
    ) -> None:
        before = serve(engine, requests)
        engine.load_weights(other_model.named_parameters(), 7)
        self._assert_logprobs(other_model, processor, requests, serve(engine, requests))
        engine.load_weights(model.named_parameters(), 8)
        self._assert_same(serve(engine, requests), before)

    def test_adapters_of_decoder_and_tower_are_merged_into_the_folders_weights(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        processor: ImageProcessor,
        requests: list[GenerationRequest],
    ) -> None:
        adapted = deepcopy(model)
        adapters: dict[str, Tensor] = {}
        numbers = torch.Generator().manual_seed(7)
        for name, weight in adapted.named_parameters():
            if name.endswith(
                ("0.self_attn.q_proj.weight", "1.mlp.down_proj.weight", "blocks.0.attn.proj.weight")
            ):
                layer = name.removesuffix(WEIGHT)
                a, b = (
                    torch.randn(shape, generator=numbers) * 0.3
                    for shape in ((2, weight.shape[1]), (len(weight), 2))
                )
                adapters |= {layer + A: a, layer + B: b}
                weight.data += 0.5 * b @ a
        assert len(adapters) == 6
        before = serve(engine, requests)
        if not isinstance(engine, TakesAdapters):
            pytest.skip("it takes whole weights alone")
        engine.load_adapters(adapters.items(), 0.5, 3)
        self._assert_logprobs(adapted, processor, requests, serve(engine, requests))
        engine.load_weights(model.named_parameters(), 4)
        self._assert_same(serve(engine, requests), before)

    @pytest.mark.parametrize(
        "wrong", ["a place less", "a place more", "an image less", "an image more"]
    )
    def test_a_prompt_that_does_not_show_its_images_is_refused(
        self,
        engine: RolloutEngine,
        processor: ImageProcessor,
        requests: list[GenerationRequest],
        wrong: str,
    ) -> None:
        request = requests[2]
        at = request.prompt.index(processor.image_token)
        ids = list(request.prompt)
        images = request.images
        if wrong == "a place less":
            del ids[at]
        elif wrong == "a place more":
            ids.insert(at, processor.image_token)
        else:
            images = images[:1] if wrong == "an image less" else (*images, images[0])
        with pytest.raises(DataError, match="image"):
            serve(engine, [replace(request, prompt=ids, images=images)])
        assert serve(engine, [request])[0].token_ids, "it goes on"

    def _assert_same(self, samples: Sequence[Generation], expected: Sequence[Generation]) -> None:
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
        for sample, other in zip(samples, expected, strict=True):
            assert_close(
                torch.tensor(sample.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0
            )

    def _assert_logprobs(
        self,
        model: PreTrainedModel,
        processor: ImageProcessor,
        requests: Sequence[GenerationRequest],
        samples: Sequence[Generation],
    ) -> None:
        for request, sample in zip(requests, samples, strict=True):
            expected = response_logprobs(model, processor, request, sample.token_ids)
            assert_close(torch.tensor(sample.logprobs), expected, atol=self.tolerance, rtol=0)


def _negative(image: Image) -> Image:
    """Return a picture of the same size with every colour turned round."""
    assert image.data is not None
    shown = pil.open(io.BytesIO(image.data))
    file = io.BytesIO()
    pil.fromarray(255 - np.asarray(shown)).save(file, "PNG")
    return Image(file.getvalue())
