"""Tests of weights that are announced and then arrive one after the other."""

import pytest
import torch

from siirl_dask.errors import PeerError
from siirl_dask.rollout import WeightStream
from siirl_dask.rollout.weight_loading import WeightLoader
from siirl_dask.tasks.tiny_model import tiny_model


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    return WeightLoader.of_folder(
        str(tiny_model(tmp_path_factory.mktemp("weights") / "model", seed=1, tied=True))
    )


@pytest.fixture
def shapes(parameters):
    return {name: tuple(shape) for name, shape in parameters._shapes.items()}


def zeros(shapes):
    return ((name, torch.zeros(shape)) for name, shape in shapes.items())


def test_tensors_are_yielded_as_they_arrive(parameters, shapes):
    given = parameters.fit(WeightStream(shapes, zeros(shapes)), 1)
    assert [(name, tuple(tensor.shape)) for name, tensor in given] == list(shapes.items())


def test_the_last_of_two_names_of_a_parameter_counts(parameters, shapes):
    both = {**shapes, "lm_head.weight": shapes["model.embed_tokens.weight"]}
    tensors = [
        (name, torch.full(shape, float(number)))
        for number, (name, shape) in enumerate(both.items())
    ]
    for weights in (tensors, WeightStream(both, iter(tensors))):
        given = dict(parameters.fit(weights, 1))
        assert given.keys() == shapes.keys()
        assert given["model.embed_tokens.weight"].unique().tolist() == [len(both) - 1]


def changed(shapes, change):
    names = list(shapes)
    if change == "fewer":
        return {name: shapes[name] for name in names[:-1]}
    if change == "another shape":
        return {**shapes, names[3]: (7,)}
    if change == "another order":
        return {name: shapes[name] for name in reversed(names)}
    return {**shapes, "more": (1,)}


@pytest.mark.parametrize("change", ["fewer", "another shape", "another order", "more"])
def test_tensors_that_were_not_announced_are_refused(parameters, shapes, change):
    coming = WeightStream(shapes, zeros(changed(shapes, change)))
    with pytest.raises(PeerError, match=r"weights of version 9: .* announced"):
        list(parameters.fit(coming, 9))
