"""Pixels and placeholders, which all that read images must make alike."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image as pil
from transformers import AutoImageProcessor, AutoProcessor

from siirl_dask.config import ImagesConfig
from siirl_dask.errors import ConfigError, ImageError
from siirl_dask.images import Image, load_processor
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.images.reading import size_of
from siirl_dask.tasks.tiny_vlm import CELL
from tests.images.pictures import png, png_header

SIDE = st.integers(1, 400)


def fresh(model, **settings):
    return ImageProcessor.load(str(model), ImagesConfig(column="images", **settings))


@pytest.mark.skipif(
    find_spec("torchvision") is None, reason="transformers' own processors need torchvision"
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_pixels_and_ids_are_those_of_the_models_own_processor(tiny_folders, family):
    folder = tiny_folders[family]
    ours, own = fresh(folder), AutoProcessor.from_pretrained(folder)
    images = [Image(png(30, 20, seed=1)), Image(png(300, 200, seed=2))]
    text = f"what? {ours.family.placeholder}{ours.family.placeholder} red"
    theirs = own(text=[text], images=[ours.picture(image) for image in images], return_tensors="pt")
    made = [ours.pixels(image) for image in images]
    assert (
        torch.cat([pixels.values for pixels in made]) - theirs["pixel_values"]
    ).abs().max() < 1e-6
    assert [list(pixels.grid) for pixels in made] == theirs["image_grid_thw"].tolist()
    assert ours.expand(own.tokenizer(text)["input_ids"], images) == theirs["input_ids"][0].tolist()


def test_two_processors_make_the_same_bits_and_names(tiny_folders):
    image = Image(png(75, 43))
    one, other = (fresh(tiny_folders["qwen2_5_vl"]) for _ in range(2))
    assert torch.equal(one.pixels(image).values, other.pixels(image).values)
    assert one.identity(image) == other.identity(image)
    smaller = fresh(tiny_folders["qwen2_5_vl"], max_pixels=CELL * CELL * 4)
    assert smaller.identity(image) != one.identity(image), (
        "a cache by name would give the pixels of other settings"
    )
    assert smaller.tokens(image) < one.tokens(image)


@given(width=SIDE, height=SIDE)
def test_tokens_from_the_header_are_those_of_the_pixels(processor, width, height):
    assume(max(width, height) <= 100 * min(width, height))
    image = Image(png(width, height))
    pixels = processor.pixels(image)
    grid = processor.grid(image)
    assert grid == pixels.grid
    assert len(pixels.values) == grid[0] * grid[1] * grid[2] == 4 * processor.tokens(image)
    least, most = processor.pixel_limits
    picture = processor.picture(image)
    assert picture.width % CELL == picture.height % CELL == 0
    assert least <= picture.width * picture.height <= most


@given(data=st.data())
def test_an_expanded_prompt_has_its_texts_and_each_images_tokens_in_place(processor, data):
    text = st.lists(st.integers(0, 200), min_size=1, max_size=4)
    sizes = data.draw(st.lists(st.tuples(st.integers(8, 40), st.integers(8, 40)), max_size=4))
    images = [Image(png(*size, seed=at)) for at, size in enumerate(sizes)]
    texts = [data.draw(text) for _ in range(len(images) + 1)]
    ids, expected = list(texts[0]), list(texts[0])
    for image, after in zip(images, texts[1:], strict=True):
        ids += [processor.image_token, *after]
        expected += [*[processor.image_token] * processor.tokens(image), *after]
    assert processor.expand(ids, images) == expected


@pytest.mark.parametrize(
    ("ids", "count", "said"),
    [
        ([1, "i", 2], 2, r"1 place for images and 2 images: expected as many"),
        ([1, "i", 2, "i"], 1, r"2 places for images and 1 image:"),
        ([1], 1, "no places for images and 1 image"),
        ([1, "i", "i", 2], 2, "nothing between them"),
        ([1, "i"] * 9, 9, r"9 images: expected at most 8 \(images.most\)"),
    ],
)
def test_a_prompt_that_says_something_else_than_its_images_is_refused(processor, ids, count, said):
    ids = [processor.image_token if token == "i" else token for token in ids]
    with pytest.raises(ImageError, match=said):
        processor.expand(ids, [Image(png())] * count)


def test_what_is_wrong_with_an_image_is_told_with_its_number(processor):
    ids = [processor.image_token, 1, processor.image_token]
    with pytest.raises(ImageError, match="image 2 of 2: it is no JPEG"):
        processor.expand(ids, [Image(png()), Image(b"nothing")])
    with pytest.raises(ImageError, match="image 1 of 1: it is damaged or cut off"):
        processor.check([Image(png(64, 64)[:-2000])])


def test_a_file_at_a_url_is_the_image_of_its_bytes(tiny_folders, tmp_path):
    data = png(40, 40)
    (tmp_path / "a.png").write_bytes(data)
    at_path, relative, inline = (
        Image(None, str(tmp_path / "a.png")),
        Image(None, "a.png"),
        Image(data),
    )
    here = fresh(tiny_folders["qwen2_5_vl"], folder=str(tmp_path))
    here.bring([at_path, relative, Image(None, "gone.png")])
    (tmp_path / "a.png").unlink()  # both were fetched before, and are in the cache
    assert here.identity(at_path) == here.identity(relative) == here.identity(inline)
    assert torch.equal(here.pixels(relative).values, here.pixels(inline).values)
    with pytest.raises(ImageError, match=r"'a.png' is relative: set images.folder"):
        fresh(tiny_folders["qwen2_5_vl"]).tokens(relative)


def test_files_are_not_fetched_again_for_pixels_that_take_their_room(tiny_folders, tmp_path):
    images = [Image(None, str(tmp_path / f"{number}.png")) for number in range(8)]
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(png(40, 40, seed=number))
    # the files are 40 kB, what is made of them is 350 kB
    here = fresh(tiny_folders["qwen2_5_vl"], cache="100kB")
    here.bring(images)
    for number in range(8):
        (tmp_path / f"{number}.png").unlink()
    assert [here.pixels(image).grid for image in images] == [here.grid(image) for image in images]


def test_what_is_cached_is_made_once(tiny_folders):
    image, here = Image(png(40, 40)), fresh(tiny_folders["qwen2_5_vl"])
    assert here.pixels(image) is here.pixels(Image(image.data))
    none = fresh(tiny_folders["qwen2_5_vl"], cache="1B")
    assert none.pixels(image) is not none.pixels(image)


def test_without_a_column_there_is_no_processor(tiny_folders):
    folder = str(tiny_folders["qwen3_vl"])
    assert load_processor(folder, ImagesConfig()) is load_processor(folder, None) is None
    assert load_processor(folder, ImagesConfig(column="images")).image_token > 0


@pytest.mark.parametrize(
    ("file", "key", "value", "said"),
    [
        ("config.json", "model_type", "qwen3", "expected one of qwen2_vl, qwen2_5_vl, qwen3_vl"),
        ("config.json", "vision_config", None, "sees no images, and images.column is set"),
        (
            "preprocessor_config.json",
            "patch_size",
            16,
            r"patch_size=4, and its preprocessor_config.json patch_size=16",
        ),
        ("preprocessor_config.json", "image_processor_type", "Nope", "its image processor"),
    ],
)
def test_a_folder_that_cannot_process_images_is_refused_by_what_it_has(
    tiny_folders, tmp_path, file, key, value, said
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folders["qwen2_5_vl"], folder)
    content = json.loads((folder / file).read_text())
    if value is None:
        content = {name: kept for name, kept in content.items() if name != key} | {
            "model_type": "qwen3"
        }
    else:
        content[key] = value
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        fresh(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"min_pixels": 100, "max_pixels": 10},
            "images.min_pixels=100 is above images.max_pixels=10",
        ),
        ({"most": 0}, "images.most=0"),
        ({"max_bytes": "many"}, "images.max_bytes='many'"),
        ({"cache": "0"}, "images.cache"),
        ({"timeout": 0.0}, "images.timeout"),
        ({"column": " "}, "images.column"),
        (
            {"max_source_pixels": 200_000_000},
            "expected at most 178956970, of which Pillow opens images",
        ),
        (
            {"column": None, "max_pixels": 100},
            "images.max_pixels=100 and images.column=null, so no images are read",
        ),
        ({"column": None, "folder": "here"}, "images.folder='here' and images.column=null"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ImagesConfig(**{"column": "images", **settings})


def test_pillow_opens_images_of_as_many_pixels_as_settings_allow():
    """Its limit is its own: a setting above it would have no effect."""
    most = ImagesConfig(column="images", max_source_pixels=178_956_970).max_source_pixels
    with pytest.warns(pil.DecompressionBombWarning):
        assert size_of(png_header(most, 1), most) == (most, 1)
    with pytest.raises(ImageError, match="too many pixels"):
        size_of(png_header(most + 1, 1), most + 1)


def test_limits_of_settings_and_folder_that_leave_no_size_are_refused(tiny_folders):
    with pytest.raises(ConfigError, match="give 1000000 to 16384 pixels"):
        fresh(tiny_folders["qwen2_5_vl"], min_pixels=1000000)


def test_the_models_own_resize_leaves_a_picture_alone(tiny_folders):
    """vLLM runs it on what it is given: a second resize would give it other pixels than the
    trainer has.
    """
    own = AutoImageProcessor.from_pretrained(tiny_folders["qwen2_5_vl"], backend="pil")
    ours = fresh(tiny_folders["qwen2_5_vl"])
    for size in [(30, 20), (300, 200), (3, 3), (7, 640), (1000, 11)]:
        image = Image(png(*size))
        again = own(images=[ours.picture(image)], return_tensors="pt")
        assert torch.equal(again["pixel_values"], ours.pixels(image).values)
