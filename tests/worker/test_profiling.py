"""Profiles of nodes: asked-for nodes have one that Perfetto opens, all others none, and a run
never ends for one.
"""

from __future__ import annotations

import gzip
import json
import logging
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest
import torch

from siirl_dask.config import ProfileConfig, ProfileLevel
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices.profiler import make_profiler
from siirl_dask.planner import Iteration, Node, Phase
from siirl_dask.planner.contract import columns
from siirl_dask.worker.monitoring.profiling import Profiling


@columns(writes={"reward": pa.float32()})
def multiply(ctx, table):
    torch.ones(64, 64) @ torch.ones(64, 64)
    return table


UPDATE = Node("update", multiply, role="policy", after=("rollout",))
TRAIN = Iteration(Phase.TRAIN, 3, 7)


def profiling(url, **asked):
    return Profiling(ProfileConfig(**asked), str(url), Device("tcp://127.0.0.1:1"))


def profiled(url, node=UPDATE, iteration=TRAIN, rank=0, **asked):
    with profiling(url, **asked).of(node, iteration, Rank(rank, 4)):
        multiply(None, None)
    return sorted(path.relative_to(url).as_posix() for path in url.rglob("*") if path.is_file())


def events(url):
    (path,) = url.rglob("*.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_off_means_off(tmp_path):
    for asked in ({}, {"roles": ["policy"], "ranks": [0], "level": ProfileLevel.stacks}):
        assert isinstance(profiling(tmp_path, **asked).of(UPDATE, TRAIN, Rank()), nullcontext)


def test_a_profile_is_a_chrome_trace_of_the_nodes_operators(tmp_path):
    assert profiled(tmp_path, steps=[3]) == ["profile/step=000003/update.tcp___127.0.0.1_1.json.gz"]
    spans = [event for event in events(tmp_path) if event.get("ph") == "X"]
    assert {"ts", "dur", "pid", "tid", "name"} <= set(spans[0])
    assert "aten::matmul" in {span["name"] for span in spans}


@pytest.mark.parametrize(
    ("level", "shapes", "lines"),
    [("time", False, False), ("memory", True, False), ("stacks", True, True)],
)
def test_each_level_has_what_the_ones_before_have(level, shapes, lines, tmp_path):
    profiled(tmp_path, steps=[3], level=ProfileLevel(level))
    found = events(tmp_path)
    assert any("Input Dims" in event.get("args", {}) for event in found) == shapes
    assert any(event["name"] == "[memory]" for event in found) == shapes
    assert any(event.get("cat") == "python_function" for event in found) == lines


@pytest.mark.parametrize(
    "asked",
    [
        {"steps": [2, 4]},
        {"steps": [3], "roles": ["rollout"]},
        {"steps": [3], "ranks": [1, 2]},
    ],
    ids=str,
)
def test_what_was_not_asked_for_is_not_profiled(asked, tmp_path):
    assert profiled(tmp_path, **asked) == []


def test_only_training_steps_are_profiled_and_replayed_ones_count(tmp_path):
    assert profiled(tmp_path, iteration=Iteration(Phase.VALIDATION, 3, 7), steps=[3]) == []
    assert (
        len(
            profiled(
                tmp_path, iteration=Iteration(Phase.REPLAY, 3, 7, frontier="rollouts"), steps=[3]
            )
        )
        == 1
    )


def test_all_ranks_are_profiled_where_none_is_named(tmp_path):
    assert len(profiled(tmp_path, rank=3, steps=[3], ranks=[])) == 1


def test_an_error_of_the_node_passes_and_what_it_did_until_then_is_written(tmp_path):
    def fail():
        with profiling(tmp_path, steps=[3]).of(UPDATE, TRAIN, Rank()):
            multiply(None, None)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert "aten::matmul" in {event["name"] for event in events(tmp_path)}


def test_a_profile_that_cannot_be_taken_or_written_is_named_and_the_node_runs(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    (tmp_path / "file").write_text("a file where a folder is to be")
    asked, ran = ProfileConfig(steps=[3]), []
    for url, kind in ((tmp_path, DeviceKind.NPU), (tmp_path / "file", DeviceKind.CPU)):
        profile = Profiling(asked, str(url), Device("0", kind)).of(UPDATE, TRAIN, Rank())
        with caplog.at_level(logging.WARNING, "siirl_dask.worker"), profile:
            ran.append(kind)
    assert ran == [DeviceKind.NPU, DeviceKind.CPU]
    said = [record.message for record in caplog.records]
    assert [message.partition(":")[0] for message in said] == [
        f"there is no profile of node 'update', {TRAIN}"
    ] * 2
    assert "torch_npu" in said[0]


def test_an_npu_is_profiled_by_its_own_library_at_the_level_asked_for(monkeypatch):
    """torch_npu is on no machine of this project's: what it is called with is held to its
    documentation.
    """
    made = {}
    library = ModuleType("torch_npu")
    library.profiler = SimpleNamespace(
        ProfilerActivity=SimpleNamespace(CPU="cpu", NPU="npu"),
        ProfilerLevel=SimpleNamespace(Level0=0, Level1=1, Level2=2),
        _ExperimentalConfig=lambda profiler_level: ("level", profiler_level),
        _KinetoProfile=lambda **options: made.update(options) or "profiler",
    )
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    assert make_profiler(DeviceKind.NPU, ProfileLevel.stacks) == "profiler"
    assert made == {
        "activities": ["cpu", "npu"],
        "experimental_config": ("level", 2),
        "record_shapes": True,
        "profile_memory": True,
        "with_stack": True,
    }
