"""Places of images in prompts, positions of their tokens, and what a tower makes of them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.config import ImagesConfig
from siirl_dask.errors import DataError
from siirl_dask.images.features import has_image_positions, image_features, image_places, positions
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.rollout.image_prompts import collapsed
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.image_engines import load_image_model, picture
from siirl_dask.testing.reference_model import load_model

PAD = 9
TEXT = st.lists(st.integers(0, 8), min_size=1, max_size=4)


@given(
    parts=st.lists(st.tuples(TEXT, st.integers(1, 5)), max_size=4),
    sampled=st.lists(st.integers(5, PAD), max_size=6),
)
def test_the_first_placeholders_are_those_of_the_images_and_sampled_ones_stay(parts, sampled):
    short = [token for text, _ in parts for token in (*text, PAD)] + [0]
    long = [token for text, count in parts for token in (*text, *[PAD] * count)] + [0]
    counts = [count for _, count in parts]
    places = image_places([*long, *sampled], PAD, counts)
    assert [len(place) for place in places] == counts
    assert all(set(long[place.start : place.stop]) == {PAD} for place in places)
    assert all(one.stop < other.start for one, other in pairwise(places))
    assert collapsed([*long, *sampled], places) == [*short, *sampled]


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        ([1, PAD, 2], [2], "image 0 of a prompt has 2 tokens and the prompt keeps 1 places"),
        ([1, PAD], [2], "keeps 1 places"),
        ([1, PAD, PAD, 2], [2, 1], "placeholders of 1 images, and 2 images are given"),
    ],
)
def test_places_of_other_images_are_refused(ids, counts, message):
    with pytest.raises(DataError, match=message):
        image_places(ids, PAD, counts)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_features_of_an_image_do_not_depend_on_those_beside_it_and_have_gradients(tmp_path, family):
    folder = tiny_vlm(tmp_path / "model", family=family)
    model = load_image_model(folder)
    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    pixels = [processor.pixels(picture(seed, 16 + 8 * seed, 24)) for seed in range(3)]
    together = image_features(model, pixels)
    for each, own in zip(pixels, together, strict=True):
        (alone,) = image_features(model, [each])
        assert len(alone.levels) == len(own.levels) == (family == "qwen3_vl")
        for one, other in zip(
            (alone.embeddings, *alone.levels), (own.embeddings, *own.levels), strict=True
        ):
            assert_close(one, other, atol=1e-5, rtol=0)
    sum(each.embeddings.sum() for each in together).backward()
    assert any(
        weight.grad is not None and weight.grad.any() for weight in model.model.visual.parameters()
    )
    assert image_features(model, []) == []


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_an_image_grow_in_its_rows_and_columns(tmp_path, family):
    model = load_image_model(tiny_vlm(tmp_path / "model", family=family))
    ids = [1, 2, *[PAD] * 6, 3, 4, PAD]
    found = positions(model, ids, [range(2, 8)], [(1, 4, 6)])
    assert has_image_positions(model)
    assert found[:, :2].tolist() == [[0, 1]] * 3
    assert found[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert found[:, 8:].tolist() == [[5, 6, 7]] * 3
    with pytest.raises(DataError, match="no token between"):
        positions(model, ids, [range(2, 4), range(4, 8)], [(1, 2, 4), (1, 4, 4)])


def test_text_counts_in_all_dimensions_and_so_do_models_without_positions_for_images(tmp_path):
    model = load_model(tiny_model(tmp_path / "model"))
    assert not has_image_positions(model)
    assert torch.equal(
        positions(model, [1, PAD, 2], [range(1, 2)], [(1, 2, 2)]), torch.arange(3).expand(3, -1)
    )
