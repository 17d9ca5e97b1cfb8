"""Experts of a mixture: a tensor each in files, one parameter in the modules."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from siirl_dask.errors import ConfigError
from siirl_dask.models.weight_files import check_weights, open_weights
from siirl_dask.models.weight_names import read_stored, stored_parameters
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model
from tests.training.test_placeholders import written


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


def test_experts_of_which_a_model_has_two_parameters_are_read_into_both_and_none_is_called_lacking(
    tmp_path,
):
    """ERNIE-4.5-VL's files number experts of text and those of images, which are narrower, as one."""
    model = written(tmp_path, "ernie4_5_vl_moe")
    check_weights(str(tmp_path))
    stored = stored_parameters(model, open_weights(str(tmp_path)))
    parameters = dict(model.named_parameters())
    experts = {name for name in parameters if ".experts." in name}
    assert len(experts) == 4
    for name, parameter in parameters.items():
        assert torch.equal(read_stored(stored[name]), parameter), name
    files = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in files.items() if ".experts.7." not in name},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ConfigError, match=r"vision_moe\.experts\.\S+ has shape \[3, .* where \[4, "
    ):
        check_weights(str(tmp_path))
