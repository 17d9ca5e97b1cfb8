"""Where images stand in a prompt."""

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from siirl_dask.errors import ImageError
from siirl_dask.images.prompts import marked

HERE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT, PICTURE = {"type": "text", "text": "how many?"}, {"type": "image"}


def test_a_mark_in_a_text_becomes_the_models_placeholder():
    assert marked("<image>a<image>", HERE) == f"{HERE}a{HERE}"
    assert marked("a", HERE) == "a"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<image>how many?", [PICTURE, TEXT]),
        ("how many?", [TEXT]),
        ("", [{"type": "text", "text": ""}]),
        ([PICTURE, TEXT], [PICTURE, TEXT]),
        ([{"type": "text", "text": "<image>how many?"}], [PICTURE, TEXT]),
        (None, None),
    ],
)
def test_a_messages_content_becomes_texts_and_images_in_turn(content, expected):
    assert marked([{"role": "user", "content": content}], HERE) == [
        {"role": "user", "content": expected}
    ]


def test_arrows_nulls_make_no_image_of_a_text():
    """A chat template that looks for the key `image` would take each text for one."""
    rows = pa.array(
        [[{"type": "image", "text": None, "image": None}, {"type": "text", "text": "how many?"}]]
    ).to_pylist()
    assert rows[0][1]["image"] is None
    assert marked([{"role": "user", "content": rows[0]}], HERE)[0]["content"] == [PICTURE, TEXT]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"type": "image", "image": "a.png"}, "an image of its own, under 'image'"),
        ({"type": "video"}, r"has \{'type': 'video'\}: expected"),
        ({"type": "text"}, "expected {type: text"),
        (7, "has 7: expected"),
    ],
)
def test_an_entry_that_is_neither_text_nor_placeholder_is_refused(entry, said):
    with pytest.raises(ImageError, match=said):
        marked([{"role": "user", "content": [entry]}], HERE)


def test_the_chat_template_writes_one_placeholder_an_image(tiny_folders):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders["qwen2_5_vl"])
    chat = marked([{"role": "user", "content": "<image>red?"}], HERE)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == f"user: {HERE}red?\nassistant:"
    (start, pad, end), ids = tokenizer(HERE)["input_ids"], tokenizer(text)["input_ids"]
    assert ids.count(pad) == 1
    assert len({start, pad, end}) == 3
