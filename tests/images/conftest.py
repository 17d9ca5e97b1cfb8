import pytest
import torch

from siirl_dask.config import ImagesConfig

torch.set_num_threads(1)  # faster than more on models this small


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """Folders of a tiny model of each family."""
    from siirl_dask.tasks.tiny_vlm import tiny_vlm

    place = tmp_path_factory.mktemp("vlm")
    return {
        family: tiny_vlm(place / family, family=family)
        for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    }


@pytest.fixture(scope="session")
def processor(tiny_folders):
    from siirl_dask.images.processor import ImageProcessor

    return ImageProcessor.load(str(tiny_folders["qwen2_5_vl"]), ImagesConfig(column="images"))
