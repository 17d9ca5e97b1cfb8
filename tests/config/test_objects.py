"""A configuration that is an object means what the same values in a file mean."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import MISSING, OmegaConf

from siirl_dask.config import Config, RolloutConfig, RunConfig
from siirl_dask.config.file import load, load_config_file
from siirl_dask.errors import ConfigError

VALUES = {
    "base": "siirl_dask:quickstart.yaml",
    "run": {"name": "mine", "steps": 7},
    "rollout": {"n": 4, "max_response_length": "${run.steps}"},
}


class Size(Enum):
    cispo = 1


@dataclass
class Training:
    """A program's own structured config, with groups of ours and values of its own."""

    base: str = "siirl_dask:quickstart.yaml"
    run: RunConfig = field(default_factory=lambda: RunConfig(name="mine", steps=7))
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(n=4, max_response_length=7)
    )


def forms():
    yield "a dict", VALUES
    yield "a DictConfig", OmegaConf.create(VALUES)
    part = {**VALUES, "rollout": {"n": 4, "max_response_length": "${steps}"}}
    yield "a part of a larger one", OmegaConf.create({"train": part, "steps": 7}).train


@pytest.mark.parametrize(
    ("form", "source"), [pytest.param(form, source, id=form) for form, source in forms()]
)
def test_every_form_is_the_file_with_these_values(form, source, write):
    path = write(OmegaConf.to_yaml(OmegaConf.create(VALUES)))
    assert load(source) == load(path)
    assert load_config_file(source).nodes == load_config_file(path).nodes
    changed = load(source, ["run.steps=8"])
    assert changed.run.steps == 8
    assert changed.rollout.max_response_length == (7 if "part" in form else 8)


@pytest.mark.parametrize("source", [Training, Training(), OmegaConf.structured(Training)])
def test_a_structured_config_has_our_groups_as_its_fields(source):
    config = load(source)
    assert (config.run.steps, config.rollout.n, config.rollout.max_response_length) == (7, 4, 7)
    assert load(config) == config
    assert load(config, ["run.steps=8"]).run.steps == 8


def test_values_that_yaml_has_otherwise_become_its_own():
    values = {
        "run": {"url": Path("a") / "b"},
        "data": {"url": "x"},
        "model": {"path": "m"},
        "validation": {"k": (1, 2), "n": 2},
        "storage": {"durability": Config().storage.durability},
    }
    config = load(values)
    assert config.run.url == "a/b"
    assert config.validation.k == [1, 2]
    assert config.storage == Config().storage


def test_what_a_part_of_a_larger_config_holds_is_not_resolved_twice(monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_PROGRAM", "42")
    whole = OmegaConf.create(
        {
            "text": "\\${oc.env:SECRET_OF_A_PROGRAM}",
            "train": {"base": VALUES["base"], "model": {"path": "${text}"}},
        }
    )
    assert load(whole.train).model.path.endswith("${oc.env:SECRET_OF_A_PROGRAM}")


def test_resolvers_of_the_program_are_asked_once_the_overrides_are_in():
    OmegaConf.register_resolver("half", lambda number: number / 2, replace=True)
    config = load({**VALUES, "trainer": {"lr": "${half:${algorithm.kl_coefficient}}"}},
                  ["algorithm.kl_coefficient=0.5"])  # fmt: skip
    assert config.trainer.lr == 0.25


@dataclass
class Lacking:
    base: str = "siirl_dask:quickstart.yaml"
    run: dict[str, str] = field(default_factory=lambda: {"name": MISSING})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"rollot": {}}, r"dict: unknown group 'rollot'.*did you mean 'rollout'\?"),
        ({"run": {"name": print}}, r"dict: run\.name: "),
        ({"run": {"name": b"x"}}, r"dict: run\.name=b'x': expected a value that YAML has"),
        ({"base": "absent.yaml"}, r"dict: base absent\.yaml: no such file"),
        ({"base": 1}, r"dict: base=1: expected the path"),
        (
            OmegaConf.create({**VALUES, "run": {"steps": 1.5}}),
            r"DictConfig: run\.steps=1\.5: expected a",
        ),
        (
            OmegaConf.create({"a": {"run": {"name": "${no}"}}}).a,
            r"DictConfig: a\.run\.name: .*'no'",
        ),
        (Lacking, r"Lacking: run\.name: a value is needed"),
        ([1], r"\[1\] is no configuration: expected a path, a mapping"),
        (None, r"None is no configuration"),
        (
            {**VALUES, "cluster": {"device": Size.cispo}},
            r"cluster\.device='cispo': expected one of",
        ),
    ],
)
def test_a_mistake_is_named_with_its_key(source, said):
    with pytest.raises(ConfigError, match=said):
        load(source)
