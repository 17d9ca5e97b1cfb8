"""Sizes of models that see images: from config.json as the hub has it, and from the files of
tiny ones.
"""

import json
from math import prod

import pytest

from siirl_dask.config import Config, ImagesConfig, ModelConfig, TrainerConfig, VisionPart
from siirl_dask.images.families import FAMILIES
from siirl_dask.models.architecture import read_architecture, read_tower, shapes_by_config
from siirl_dask.models.shapes import count_parameters, weight_shapes
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.training.parts import count_frozen, is_of
from siirl_dask.training.preflight import check_trainer, count_adapters
from tests.models.configs import QWEN2_5_VL_3B, write_config
from tests.settings import trainer_config

READ = ImagesConfig(column="images")
PARAMETERS = 3_754_622_976  # of Qwen2.5-VL-3B, by the index of its files


def test_a_hub_config_gives_the_parameters_that_its_files_have(tmp_path):
    folder = str(write_config(tmp_path / "model", QWEN2_5_VL_3B))
    size, family = count_parameters(folder), FAMILIES["qwen2_5_vl"]
    assert size.total == PARAMETERS
    tower = {
        name: shape
        for name, shape in shapes_by_config(folder).items()
        if is_of(VisionPart.visual, name, family)
    }
    encoder = [
        prod(shape) for name, shape in tower.items() if is_of(VisionPart.encoder, name, family)
    ]
    assert count_frozen(folder, TrainerConfig(freeze=[VisionPart.visual]), READ) == sum(
        map(prod, tower.values())
    )
    assert count_frozen(folder, TrainerConfig(freeze=[VisionPart.encoder]), READ) == sum(encoder)
    language = count_frozen(folder, TrainerConfig(freeze=[VisionPart.language_model]), READ)
    assert language + sum(map(prod, tower.values())) == PARAMETERS
    assert read_architecture(folder).layers == 36
    seen = read_tower(folder)
    assert (seen.layers.layers, seen.layers.hidden, seen.patches) == (32, 1280, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_files_of_a_real_folder_agree(tmp_path, family):
    """Files may have other names than parameters, and the same shapes."""
    folder = str(tiny_vlm(tmp_path / "model", family=family, depth=2))
    config = str(
        write_config(tmp_path / "config", json.loads((tmp_path / "model/config.json").read_text()))
    )
    assert sorted(weight_shapes(folder).values()) == sorted(shapes_by_config(config).values())
    for part in VisionPart:
        trainer = TrainerConfig(freeze=[part])
        assert count_frozen(folder, trainer, READ) == count_frozen(config, trainer, READ) > 0
    for targets in ([], ["visual"], ["visual.proj", "o_proj"]):
        adapted = trainer_config(lora_rank=2, lora_targets=targets)
        assert count_adapters(folder, adapted) == count_adapters(config, adapted)


def test_images_take_memory_and_a_frozen_tower_less_of_it(tmp_path):
    folder = str(write_config(tmp_path / "model", QWEN2_5_VL_3B))

    def working(images, **settings):
        options = {
            "model": ModelConfig(path=folder),
            "trainer": TrainerConfig(**settings),
            "images": images,
        }
        return check_trainer(options, ["a"], Config(images=READ)).device.working

    text, seen, frozen = working(None), working(READ), working(READ, freeze=[VisionPart.visual])
    named = [
        {part: size for part, size in each.items() if "tokens of images" in part}
        for each in (text, seen, frozen)
    ]
    assert not named[0]
    assert sum(named[1].values()) > 5 * sum(named[2].values()) > 0
    assert {part: size for part, size in seen.items() if part not in named[1]} == text
