"""``model.dtype=auto`` becomes one number type before anything of a run is built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import ClusterConfig, DevicePreference, Dtype
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import DeviceKind
from siirl_dask.devices import accelerator
from siirl_dask.driver.checks import number_type
from siirl_dask.driver.checks.number_type import (
    NumberType,
    expected_dtype,
    is_open,
    with_dtype,
    with_dtype_in_dag,
    workers_dtype,
)
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.models.number_type import dtype_on, torch_dtype
from siirl_dask.planner import dag_to_spec

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("siirl_dask/configs/*.yaml")])
ON_WORKERS = NumberType(Dtype.bfloat16, "nobody knows", certain=False)
NAMES = ("auto", "bfloat16")


def leaves(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def models_in(value):
    """All models in the options of a DAG's roles and nodes, as plain data."""
    if isinstance(value, dict):
        if "path" in value and "dtype" in value:
            yield value
        for item in value.values():
            yield from models_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from models_in(item)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_model_of_a_shipped_workflow_keeps_an_open_type_and_nothing_else_changes(path):
    file = load_config_file(path, ["model.path=models/mine"])
    for graph in filter(None, dags(file)):
        decided = with_dtype_in_dag(graph, Dtype.bfloat16)
        assert all(
            model["dtype"] in ("float32", "bfloat16") for model in models_in(dag_to_spec(decided))
        )
        before = [leaf for leaf in leaves(dag_to_spec(graph)) if leaf not in NAMES]
        assert [leaf for leaf in leaves(dag_to_spec(decided)) if leaf not in NAMES] == before
        assert with_dtype_in_dag(decided, Dtype.float32) is decided, (
            "a decided type is decided again"
        )
    assert not is_open(with_dtype(file.config, Dtype.bfloat16))


def test_deciding_leaves_the_users_own_configuration_as_it_was():
    config = load_config_file(shipped("quickstart.yaml"), []).config
    assert is_open(config)
    assert with_dtype(config, Dtype.bfloat16).model.dtype is Dtype.bfloat16
    assert config.model.dtype is Dtype.auto


def test_a_recorded_type_stays_whatever_the_workers_are_now():
    cluster = ClusterConfig(device_memory="80GB")
    assert expected_dtype(cluster, Dtype.float32) == NumberType(
        Dtype.float32, "the run began with it"
    )


def test_what_is_expected_without_workers_is_certain_only_where_the_configuration_or_this_machine_says_so():
    cases = [
        (
            ClusterConfig(device=DevicePreference.cpu, device_memory="80GB"),
            None,
            Dtype.float32,
            True,
        ),
        (ClusterConfig(device_memory="80GB"), None, Dtype.bfloat16, False),
        (ClusterConfig(), "h100", Dtype.bfloat16, True),
        (ClusterConfig(device_memory="80GB"), "cpu", Dtype.float32, True),
        (ClusterConfig(), None, Dtype.float32, True),
        (ClusterConfig(address="tcp://127.0.0.1:8786"), None, Dtype.float32, False),
        (ClusterConfig(address="tls://[::1]:8786"), None, Dtype.float32, False),
        (ClusterConfig(address="tcp://10.0.0.1:8786"), None, Dtype.bfloat16, False),
        (ClusterConfig(address="10.0.0.1:8786"), None, Dtype.bfloat16, False),
        (ClusterConfig(scheduler_file="scheduler.json"), None, Dtype.bfloat16, False),
        (ClusterConfig(spec="slurm.yaml"), None, Dtype.bfloat16, False),
    ]
    for cluster, device, dtype, certain in cases:
        found = expected_dtype(cluster, device=device)
        assert (found.dtype, found.certain) == (dtype, certain), cluster


def test_accelerators_of_this_machine_are_expected_and_asked(monkeypatch):
    monkeypatch.setattr(accelerator, "kind_here", lambda: DeviceKind.CUDA)
    found = expected_dtype(ClusterConfig())
    assert (found.dtype, found.certain) == (Dtype.bfloat16, False)


def test_workers_on_cpus_decide_for_float32_against_what_was_expected(cluster_address):
    with Client(cluster_address) as client:
        found = workers_dtype(client, ON_WORKERS)
    assert found == NumberType(Dtype.float32, "the workers see no accelerator")


@given(st.dictionaries(st.sampled_from(["H100", "V100", "A100"]), st.booleans()))
def test_bfloat16_is_taken_where_there_are_accelerators_and_each_has_it(found):
    decided = number_type._of_accelerators(found)
    assert (decided.dtype is Dtype.bfloat16) == (bool(found) and all(found.values()))
    assert all(name in decided.note for name, able in found.items() if not able)


class Silent:
    """A client whose workers do not answer."""

    def __init__(self, loop):
        self.loop = loop

    async def run(self, function, on_error):
        return {"tcp://10.0.0.1:1": OSError("gone")}


def test_workers_that_do_not_answer_leave_it_at_what_was_expected(cluster_address):
    with Client(cluster_address) as client:
        assert workers_dtype(Silent(client.loop), ON_WORKERS) == replace(ON_WORKERS, certain=True)


def test_a_builder_without_a_run_goes_by_its_device(monkeypatch):
    assert dtype_on(Dtype.auto, DeviceKind.CPU, 0) is Dtype.float32
    for able, dtype in ((True, Dtype.bfloat16), (False, Dtype.float32)):
        monkeypatch.setattr(accelerator, "has_bfloat16", lambda kind, index, able=able: able)
        assert dtype_on(Dtype.auto, DeviceKind.CUDA, 1) is dtype
        assert dtype_on(Dtype.float32, DeviceKind.CUDA, 1) is Dtype.float32


def test_torch_has_the_type_of_the_device_where_it_is_open():
    for dtype, expected in (
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
    ):
        assert torch_dtype(Dtype(dtype), torch.device("cpu")) is expected


def test_a_run_that_goes_on_keeps_the_type_it_began_with_and_refuses_another(train):
    train("run", "run.steps=1", "checkpoint.every=1")
    with pytest.raises(ConfigError, match=r'model\.dtype: "float32" -> "bfloat16"'):
        train("run", "run.steps=2", "checkpoint.every=1", "model.dtype=bfloat16")
    resumed = train("run", "run.steps=2", "checkpoint.every=1", "cluster.device_memory=80GB")
    assert resumed.summary.steps == 2
    assert load_config_file(resumed.url / "config.yaml", []).config.model.dtype is Dtype.float32
