"""Experts of a mixture: a tensor each in files, one parameter in the modules."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from siirl_dask.errors import ConfigError
from siirl_dask.models.weight_files import open_weights
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("experts") / "model", seed=1, family="qwen3_moe", tied=False
    )


def test_files_are_read_as_the_modules_parameters_whole_and_in_parts(folder):
    opened, parameters = open_weights(str(folder)), dict(load_model(folder).named_parameters())
    assert opened.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(opened[name].get_tensor(name), parameter), name
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        read = opened[name].get_slice(name)
        assert read.get_shape() == list(parameters[name].shape)
        part = slice(1, 3), slice(30, 50), slice(5, 64)
        assert torch.equal(read[part], parameters[name][part])


def test_a_folder_that_lacks_a_part_of_an_expert_is_refused_by_its_name(tmp_path, folder):
    files = load_file(folder / "model.safetensors")
    del files["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"layers\.1\.mlp\.experts of 4 experts: the files lack .*\(2, 'up_proj'\)",
    ):
        open_weights(str(tmp_path))
