"""Episodes with images: the trainer sees what the engine saw, whoever brought an image and
wherever it stands.
"""

from __future__ import annotations

import gc

import numpy as np
import pyarrow as pa
import pytest

from siirl_dask.config import (
    EnvironmentsConfig,
    ImagesConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
)
from siirl_dask.context import Context, Device, Rank
from siirl_dask.environments import Step, build_environments
from siirl_dask.errors import EpisodeError
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.nodes import encode_prompts, play
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.schema import TYPES
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from tests.images.pictures import noise, png
from tests.settings import rollout_config
from tests.training.roles import policy

IMAGES = ImagesConfig(column="images", observations=True)


class Screen:
    """Shows a picture after each turn, as bytes, as a Pillow image or as an array; three turns
    in all.
    """

    async def reset(self, row, seed):
        self.turns = 0
        match row["answer"]:
            case "its own":
                return None
            case "a screen":
                return [
                    {"type": "image", "image": png(24, 16, seed=3)},
                    {"type": "text", "text": "go"},
                ]
            case "both":
                return [
                    *row["prompt"],
                    {"role": "user", "content": [{"type": "image", "image": noise(16, 16, 5)}]},
                ]

    async def step(self, text):
        self.turns += 1
        if self.turns == 3:
            return Step(reward=1.0, done=True)
        picture = noise(16 + 8 * (len(text) % 3), 16, seed=len(text))
        shown = (picture, np.asarray(picture))[self.turns - 1]
        return Step(
            observation=[
                {"type": "image", "image": shown},
                {"type": "text", "text": f"{self.turns}?"},
            ]
        )


def dataset():
    """Prompts of one image, of two, and of none."""
    shown = [[png(16, 16)], [png(24, 24, 1), png(16, 24, 2)], []] * 2
    texts = ["<image>red?", "<image>or<image>?", "blue?"] * 2
    ids = pa.array(range(6), pa.int64())
    return pa.table(
        {
            **dict.fromkeys(("row_id", "group_id", "tokens"), ids),
            "prompt": [[{"role": "user", "content": text}] for text in texts],
            "images": [[{"bytes": data, "path": None} for data in row] for row in shown],
            "answer": ["its own", "both", "its own", "a screen", "its own", "a screen"],
        }
    )


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request, tmp_path_factory):
    return tiny_vlm(tmp_path_factory.mktemp("vlm") / "model", family=request.param)


def transformers_engine(folder):
    return TransformersEngine(
        ModelConfig(path=str(folder)), processor=ImageProcessor.load(str(folder), IMAGES)
    )


def played(engine, environment=Screen, *, rows=None, images=IMAGES, n=4, **settings):
    config = EnvironmentsConfig(turns=4, turn_tokens=24, **settings)
    world = build_environments(Device("w"), Rank(), environments=config, environment=environment)
    resources = {"environments": world}
    ctx = Context(
        step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=engine, resources=resources
    )
    try:
        prompts = encode_prompts(
            ctx, dataset() if rows is None else rows, max_prompt_length=64, images=images
        )
        options = {"environments": config, "max_prompt_length": 64, "images": images}
        return play(ctx, prompts, rollout=RolloutConfig(n=n, max_response_length=128), **options)
    finally:
        world.close()


def check_logprobs(folder, rows):
    scores = policy(folder, TrainerConfig(max_tokens_per_micro_batch=400), images=IMAGES).logprobs(
        pack_rows(rows).rows
    )
    mask, sampled = (
        rows[name].combine_chunks().flatten() for name in ("response_mask", "rollout_logprobs")
    )
    mask = mask.to_numpy(zero_copy_only=False)
    assert np.abs(scores.logprobs.numpy() - sampled.to_numpy())[mask].max() < 1e-5


def drawn_before_an_image(rows, token):
    """Count the rows in which the policy wrote a placeholder before the environment showed an
    image.
    """
    found = 0
    for row in rows.to_pylist():
        last = max((one["start"] for one in row["observed_images"]), default=0) - len(
            row["prompt_ids"]
        )
        pairs = zip(row["response_ids"][: max(last, 0)], row["response_mask"], strict=False)
        found += any(one == token and own for one, own in pairs)
    return found


def test_the_trainers_logprobs_are_the_engines_over_images_of_rows_and_environments(folder):
    engine = transformers_engine(folder)
    rows = played(engine)
    check_logprobs(folder, rows)
    token = engine.processor.image_token
    assert drawn_before_an_image(rows, token) > 0
    assert [len(row) for row in rows["turns"].to_pylist()] == [3] * 24
    for row in rows.to_pylist():
        seen = [*row["prompt_ids"], *row["response_ids"]]
        in_prompt = [one for one in row["observed_images"] if one["start"] < len(row["prompt_ids"])]
        assert len(row["observed_images"]) - len(in_prompt) == 2
        assert len(in_prompt) == (row["answer"] != "its own")
        assert all(
            seen[one["start"] - 1] != token == seen[one["start"]] for one in row["observed_images"]
        )
        marks = {"its own": len(row["images"]), "both": 3, "a screen": 1}[row["answer"]]
        assert row["prompt_text"].count("<|image_pad|>") == marks


def test_rows_do_not_depend_on_other_rows_and_neither_copy_images(folder):
    engine = transformers_engine(folder)
    rows = played(engine, rows=dataset().slice(0, 2), n=2)
    one = played(engine, rows=dataset().slice(1, 1), n=2, max_open=1)
    exact = [name for name in rows.column_names if name != "rollout_logprobs"]
    assert one.select(exact).equals(rows.slice(2).select(exact))
    own = [
        chunk.flatten().field(0).buffers()[2].address for chunk in rows["images"].slice(0, 2).chunks
    ]
    assert len({*own}) == 1
    assert rows.schema.field("observed_images").type == TYPES["observed_images"]


@pytest.mark.slow
def test_vllm_plays_the_same_episodes(folder):
    pytest.importorskip("vllm")
    from siirl_dask.rollout.vllm_engine.engine import VllmEngine

    expected = played(transformers_engine(folder))
    rollout = rollout_config(engine="vllm", max_rows=7, kv_cache_memory="64MiB")
    processor = ImageProcessor.load(str(folder), IMAGES)
    engine = VllmEngine(ModelConfig(path=str(folder)), rollout, Device("w"), processor=processor)
    try:
        rows = played(engine)
    finally:
        engine.close()
        gc.collect()
    assert drawn_before_an_image(rows, processor.image_token) > 0
    assert rows["response_ids"].equals(expected["response_ids"])
    assert rows["observed_images"].equals(expected["observed_images"])
    check_logprobs(folder, rows)


def says(answer, first=None):
    class Says:
        async def reset(self, row, seed):
            return first

        async def step(self, text):
            return answer

    return Says


def image(data):
    return [{"type": "image", "image": data}]


ONE = dataset().slice(0, 1)
FAILURES = {
    r"images that cannot be shown: image 1 of 1: it is no JPEG": says(image(b"no image")),
    r"step gave a message in which an image is int 3: expected its file's bytes, a data URL": says(
        image(3)
    ),
    r"an array of \(2, 2, 7\) is no picture": says(image(np.zeros((2, 2, 7), np.uint8))),
    r"place for an image, and no image": says([{"type": "image"}]),
    r"has 1 place for images and no images": says("<|image_pad|>"),
    r"2 places for images of its row, which has 1": says(
        "x", [{"role": "user", "content": "<image><image>"}]
    ),
    r"showed 3 images in a row: expected at most 2 \(images.most\)": says(image(png())),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_an_image_that_cannot_be_shown_fails_its_episode_by_name(reason, folder):
    if "qwen3" in str(folder):
        pytest.skip("the families differ in no word of this")
    settings = ImagesConfig(column="images", observations=True, most=2)
    engine = TransformersEngine(
        ModelConfig(path=str(folder)), processor=ImageProcessor.load(str(folder), settings)
    )
    with pytest.raises(EpisodeError, match=reason):
        played(engine, FAILURES[reason], rows=ONE, images=settings, n=1)


def test_an_engine_of_texts_names_the_key(folder):
    engine = TransformersEngine(ModelConfig(path=str(folder)))
    texts = ONE.set_column(3, "prompt", pa.array([[{"role": "user", "content": "x"}]]))
    with pytest.raises(EpisodeError, match=r"set images\.observations=true"):
        played(engine, says(image(png())), rows=texts, images=ImagesConfig(), n=1)
