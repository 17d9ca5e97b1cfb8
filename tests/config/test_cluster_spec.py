"""A cluster spec is a class and its arguments; any other file is refused by name."""

import re

import pytest

from siirl_dask.config import ClusterConfig
from siirl_dask.config.file import read_cluster_spec
from siirl_dask.config.file.layers import shipped_files
from siirl_dask.errors import ConfigError


def test_arguments_may_come_from_the_environment(write, monkeypatch):
    monkeypatch.setenv("ACCOUNT", "mine")
    spec = read_cluster_spec(
        write("class: some.Cluster\nkwargs: {account: '${oc.env:ACCOUNT}', cores: 4}\n")
    )
    assert (spec.class_name, spec.kwargs) == ("some.Cluster", {"account": "mine", "cores": 4})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "class: SLURMCluster",
            "class='SLURMCluster': expected a class by its module, as dask_jobqueue.SLURMCluster",
        ),
        ("kwargs: {}", "class=None: expected a class by its module"),
        ("class: 7", "class=7: expected a class by its module"),
        ("class: a.B\nkwargs: [1]", "kwargs=[1]: expected a mapping of the class's arguments"),
        (
            "class: a.B\nkwargs: {1: 2}",
            "kwargs={1: 2}: expected a mapping of the class's arguments",
        ),
        (
            "class: a.B\nkwarg: {}",
            "unknown key 'kwarg' (keys: class, kwargs); did you mean 'kwargs'?",
        ),
        ("class: a.B\nkwargs: {a: '${oc.env:NOT_THERE}'}", "expected YAML with class and kwargs: "),
        ("- class: a.B", "expected YAML with class and kwargs, and it holds a list"),
        ("class: [", "expected YAML with class and kwargs: "),
        ("", "class=None: expected a class by its module"),
    ],
)
def test_a_file_of_another_form_is_refused(write, text, said):
    path = write(text)
    with pytest.raises(ConfigError, match=re.escape(f"cluster.spec={path!r}: {said}")):
        read_cluster_spec(path)


def test_a_file_that_is_missing_is_refused_with_the_recipe_of_that_name():
    with pytest.raises(ConfigError, match=r"cluster.spec='nope.yaml': no such file$"):
        read_cluster_spec("nope.yaml")
    with pytest.raises(
        ConfigError, match=r"'slurm.yaml': no such file; copy .*clusters/slurm.yaml and adapt it$"
    ):
        read_cluster_spec("slurm.yaml")


@pytest.mark.parametrize("name", sorted(set(shipped_files("clusters")) - {"kubernetes.yaml"}))
def test_every_recipe_is_a_spec(name):
    assert read_cluster_spec(str(shipped_files("clusters")[name])).kwargs


def test_only_one_place_of_a_cluster_may_be_given():
    with pytest.raises(
        ConfigError, match=r"cluster.address and cluster.spec are given: expected one of them"
    ):
        ClusterConfig(address="tcp://127.0.0.1:1", spec="slurm.yaml")
