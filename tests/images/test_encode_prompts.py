"""Prompts with images become ids, with each image's tokens in place."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest

from siirl_dask.config import ImagesConfig, RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.images import images_of
from siirl_dask.nodes import encode_prompts, sample_until_mixed
from siirl_dask.observe import values
from siirl_dask.planner.contract import contract_of
from siirl_dask.schema import IMAGES, TYPES
from tests.images.pictures import png
from tests.images.test_bad_images import Reader

PAD = 260
STRUCTS = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
SMALL, LARGE = png(16, 16), png(32, 24)  # 4 and 12 tokens


def data(*contents):
    return [{"bytes": content, "path": None} for content in contents]


@pytest.fixture(scope="module")
def reader(tiny_folders, processor):
    from siirl_dask.rollout.tokenizer import load_tokenizer

    return Reader(load_tokenizer(str(tiny_folders["qwen2_5_vl"]), "model"), processor)


def encode(reader, prompts, images, *, name="pictures", most=99, column="prompt"):
    ids = pa.array(range(len(images)), pa.int64())
    table = pa.table({"row_id": ids, "group_id": ids, "tokens": ids, column: prompts, name: images})
    ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=reader)
    settings = ImagesConfig(column="pictures")
    return encode_prompts(ctx, table, max_prompt_length=most, column=column, images=settings), ctx


TEXT = "what? <image> and <image>"
CHATS = {
    "texts": pa.array([[{"role": "user", "content": TEXT}]]),
    "lists": pa.array(
        [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what? "},
                        {"type": "image", "text": None},
                        {"type": "text", "text": " and "},
                        {"type": "image", "text": None},
                    ],
                }
            ]
        ]
    ),
}


@pytest.mark.parametrize("kind", CHATS)
def test_each_layout_of_a_chat_gives_the_same_prompt(reader, kind):
    table, _ = encode(reader, CHATS[kind], pa.array([data(SMALL, LARGE)], STRUCTS))
    (shown,) = table["prompt_text"].to_pylist()
    here = "<|vision_start|><|image_pad|><|vision_end|>"
    assert shown == f"user: what? {here} and {here}\nassistant:"
    (ids,) = table["prompt_ids"].to_pylist()
    assert ids.count(PAD) == 4 + 12
    first = ids.index(PAD)
    assert ids[first : first + 4] == [PAD] * 4 != ids[first + 1 : first + 5]
    assert ids[-len("\nassistant:") - 13 :].count(PAD) == 12


def test_a_text_is_taken_as_it_is_and_rows_without_images_stay_texts(reader):
    prompts = pa.array([TEXT, "no picture", "none either"])
    table, ctx = encode(reader, prompts, pa.array([data(SMALL, LARGE), [], None], STRUCTS))
    assert [ids.count(PAD) for ids in table["prompt_ids"].to_pylist()] == [16, 0, 0]
    assert table["prompt_text"].to_pylist()[1:] == ["no picture", "none either"]
    assert table["tokens"].to_pylist() == [*map(len, table["prompt_ids"].to_pylist())]
    assert values(ctx.metrics)["data/images"] == 2
    assert values(ctx.metrics)["data/image_tokens"] == 16


def test_the_images_go_on_under_their_own_name_and_the_datasets_column_ends(reader):
    table, _ = encode(reader, pa.array(["<image>"]), pa.array([{"bytes": SMALL, "path": "a.png"}]))
    assert "pictures" not in table.column_names
    assert table[IMAGES].type == TYPES[IMAGES]
    assert [image.data for image in images_of(table[IMAGES][0].as_py())] == [SMALL]
    contract = contract_of(partial(encode_prompts, images=ImagesConfig(column="pictures")))
    assert (contract.reads, contract.drops) == (("prompt", "pictures"), ("pictures",))
    assert IMAGES in contract.writes.names
    assert contract_of(partial(encode_prompts, images=ImagesConfig(column="images"))).drops == ()


def test_a_dataset_whose_column_has_that_name_already_keeps_one(reader):
    ids = pa.array([0])
    table = pa.table(
        {"row_id": ids, "group_id": ids, "tokens": ids, "prompt": ["<image>"], "images": [[SMALL]]}
    )
    ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=reader)
    made = encode_prompts(ctx, table, max_prompt_length=99, images=ImagesConfig(column="images"))
    assert made.column_names.count(IMAGES) == 1
    assert made[IMAGES].type == TYPES[IMAGES]


def test_another_agents_message_shows_the_images_of_the_prompt(reader):
    settings = ImagesConfig(column="pictures")
    images = pa.array([data(SMALL)], TYPES[IMAGES])
    table, _ = encode(reader, pa.array(["you saw <image>"]), images, name=IMAGES, column="message")
    assert table["prompt_ids"].to_pylist()[0].count(PAD) == 4
    contract = contract_of(partial(encode_prompts, images=settings, column="message"))
    assert contract.reads == ("prompt", "message", IMAGES)


def test_a_prompt_too_long_with_its_images_is_dropped_before_they_are_decoded(reader):
    cut_off = LARGE[:200]  # its header is whole
    images = pa.array([data(SMALL), data(cut_off), data(SMALL)], STRUCTS)
    table, ctx = encode(reader, pa.array(["<image>"] * 3), images, most=8)
    assert table["row_id"].to_pylist() == [0, 2]
    assert [len(ids) for ids in table["prompt_ids"].to_pylist()] == [6, 6]
    assert values(ctx.metrics)["data/dropped_prompts"] == 1
    assert values(ctx.metrics)["data/shortest_dropped_prompt"] == 14


def test_a_worker_without_rows_encodes_none(reader):
    table, _ = encode(reader, pa.array([], pa.string()), pa.array([], STRUCTS))
    assert table.num_rows == 0
    assert table[IMAGES].type == TYPES[IMAGES]


def test_dynamic_sampling_reads_images_as_well():
    images = ImagesConfig(column="pictures")
    contract = contract_of(
        partial(sample_until_mixed, images=images, rollout=RolloutConfig(), scorer="r", columns=())
    )
    assert "pictures" in contract.reads
    assert IMAGES in contract.writes.names


def test_an_engine_without_images_is_refused_by_the_key_that_it_lacks(reader):
    ids = pa.array([0])
    table = pa.table(
        {"row_id": ids, "group_id": ids, "tokens": ids, "prompt": ["<image>"], "images": [[SMALL]]}
    )
    blind = Reader(reader.tokenizer, None)
    ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=blind)
    with pytest.raises(
        ConfigError,
        match=r"images.column='images', and the engine takes texts alone: give its role's",
    ):
        encode_prompts(ctx, table, max_prompt_length=99, images=ImagesConfig(column="images"))
