"""Checkpoints on a store: exact, written from a copy, loaded on other numbers of ranks, and
never trusted.
"""

import os
import pickle
import threading
from concurrent.futures import Future
from enum import Enum
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from siirl_storage import open_fs, write_atomic
from siirl_storage.files import list_files
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.checkpoint import metadata
from torch.utils._python_dispatch import TorchDispatchMode

from siirl_dask.collectives import BACKENDS
from siirl_dask.devices import accelerator
from siirl_dask.errors import CheckpointError
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.training.files import checkpoint
from siirl_dask.training.files.checkpoint import DistributedCheckpoint, read_model
from siirl_dask.training.parallel import mesh
from tests.names import NEIGHBOURS

ROWS = 7  # rows of the sharded matrix, not divisible by the ranks


@pytest.fixture
def url(store_url):
    return f"{store_url}/policy"


def state(weight, lr=1e-3):
    return {
        "model": {
            "layers.0.weight": torch.full((3, 2), weight),
            "norm": torch.full((2,), weight).double(),
        },
        "optimizer": {
            "norm": {"step": torch.tensor(weight), "exp_avg": torch.zeros(0)},
            "groups": [{"lr": lr}],
        },
        "progress": {"steps": torch.tensor(int(weight))},
    }


def test_a_write_that_ends_after_its_run_was_aborted_prints_nothing(tmp_path, monkeypatch, caplog):
    writing = Future()
    monkeypatch.setattr(checkpoint, "async_save", lambda state, **options: writing)
    saved = DistributedCheckpoint(asynchronous=True).save(
        str(tmp_path / "policy"), state(3.0), None
    )
    saved.cancel()
    writing.set_result(None)
    assert not caplog.records


def check_apart(base, names):
    folder = f"{base}/{uuid4().hex}"
    own, other = (f"{folder}/{name}" for name in names)
    fs, path = open_fs(f"{other}/.metadata.tmp")
    write_atomic(fs, path, b"under way")
    DistributedCheckpoint().save(own, state(3.0), None).result()
    assert read_model(own)["norm"].tolist() == [3.0, 3.0]
    assert list(list_files(*open_fs(other)).items()) == [(".metadata.tmp", len(b"under way"))]


@settings(max_examples=10)
@given(names=NEIGHBOURS)
@example(names=("exp[1]*?", "exp1XX"))
def test_no_name_leads_to_the_files_of_another(names):
    check_apart("memory://tests", names)


def test_no_name_on_s3_leads_to_the_files_of_another(s3):
    check_apart(s3, ("exp[1]*?", "exp1XX"))


def test_a_save_writes_in_a_thread_with_the_device_of_the_one_that_saves(tmp_path, monkeypatch):
    """DCP asks for a stream there: a thread's device is the first one unless it is told, and a
    context takes memory.
    """
    current, used = threading.local(), []
    monkeypatch.setattr(
        checkpoint, "binding", partial(bound_like, current, checkpoint.binding, monkeypatch)
    )
    write = checkpoint.FsspecWriter.write_data
    noted = lambda self, *args: used.append(getattr(current, "index", 0)) or write(self, *args)  # noqa: E731
    monkeypatch.setattr(checkpoint.FsspecWriter, "write_data", noted)
    current.index = 3
    DistributedCheckpoint().save(str(tmp_path / "policy"), state(3.0), None).result()
    assert used == [3]


def bound_like(current, binding, monkeypatch):
    """Call ``binding()`` where torch has accelerators, of which each thread has a current one."""
    with monkeypatch.context() as there:
        there.setattr(torch.accelerator, "is_available", lambda: True)
        there.setattr(
            torch.accelerator, "current_device_index", lambda: getattr(current, "index", 0)
        )
        there.setattr(
            torch.accelerator, "set_device_index", lambda index: setattr(current, "index", index)
        )
        return binding()


def test_the_group_that_one_device_gets_for_fsdp_takes_asynchronous_saves(tmp_path, monkeypatch):
    """nccl serves a device and no CPU, which DCP demands of the default group; another such
    backend stands for it.
    """
    name = "pretend"
    if name not in dist.Backend.backend_list:
        fake = lambda options, _: FakeProcessGroup._create_internal(  # noqa: E731
            options.group_rank, options.group_size
        )
        dist.Backend.register_backend(name, fake, extended_api=True, devices=["cuda"])
    monkeypatch.setitem(BACKENDS, "cuda", name)
    if dist.is_initialized():
        dist.destroy_process_group()
    group = mesh.group_of_one("cuda")
    assert torch.device("cuda") in group._device_types
    DistributedCheckpoint().save(str(tmp_path / "policy"), state(3.0), None).result()
    back = state(0.0)
    DistributedCheckpoint().load(str(tmp_path / "policy"), back, None)
    assert back["progress"]["steps"] == 3


class Copies(TorchDispatchMode):
    """Records copies and waits in their order. A thread that writes has none of it."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            without_waiting = (
                args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
            )
            self.log.append((args[1].numel(), "goes on" if without_waiting else "waits"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def beside_a_device(monkeypatch):
    """Let the CPU's memory be an accelerator's; return the sizes of pinned pieces, and the
    copies.
    """
    pieces, copies, empty = [], Copies(), torch.empty

    def pretend(*size, pin_memory=False, **options):
        if pin_memory:
            pieces.append(size[0])
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", pretend)
    monkeypatch.setattr(accelerator, "pins_host_memory", lambda device: True)
    monkeypatch.setattr(
        accelerator, "synchronize", lambda device: copies.log.append("all have arrived")
    )
    return pieces, copies


def test_a_state_on_a_device_is_copied_to_pinned_memory_with_one_wait(tmp_path, beside_a_device):
    pieces, copies = beside_a_device
    live = state(3.0)
    live["model"]["turned"] = torch.arange(6.0).view(2, 3).T
    with copies:
        saved = DistributedCheckpoint().save(str(tmp_path / "policy"), live, None)
    live["model"]["turned"].zero_()
    saved.result()
    *arriving, last = copies.log
    assert (
        sorted(arriving)
        == [(0, "waits")] + [(1, "goes on")] * 2 + [(2, "goes on")] + [(6, "goes on")] * 2
    )
    assert last == "all have arrived"
    held = sum(tensor.nbytes for tensor in (*live["model"].values(), torch.zeros(3)))
    assert held <= sum(pieces) <= held + 6 * 512, "as much is pinned as the state has"
    back = state(0.0)
    back["model"]["turned"] = torch.zeros(3, 2)
    DistributedCheckpoint().load(str(tmp_path / "policy"), back, None)
    assert back["model"]["turned"].equal(torch.arange(6.0).view(2, 3).T)
    assert back["model"]["layers.0.weight"].equal(live["model"]["layers.0.weight"])
    assert back["progress"]["steps"] == 3


def test_a_state_in_the_hosts_memory_is_copied_without_pinned_memory(
    tmp_path, beside_a_device, monkeypatch
):
    pieces, copies = beside_a_device
    monkeypatch.setattr(accelerator, "pins_host_memory", lambda device: False)
    with copies:
        DistributedCheckpoint().save(str(tmp_path / "policy"), state(3.0), None).result()
    assert pieces == []
    assert copies.log
    assert all(how == "waits" for _, how in copies.log), copies.log


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_loads_as_it_was_when_it_was_saved(url, asynchronous):
    store, live = DistributedCheckpoint(asynchronous), state(3.0)
    saved = store.save(url, live, None)
    live["model"]["layers.0.weight"].zero_()  # training goes on
    saved.result()
    back = state(0.0, lr=0.0)
    store.load(url, back, None)
    expected = state(3.0)
    assert back["model"]["layers.0.weight"].equal(expected["model"]["layers.0.weight"])
    assert back["optimizer"]["norm"]["step"] == 3.0
    assert back["optimizer"]["groups"] == [{"lr": 1e-3}]
    assert back["progress"]["steps"] == 3
    model = read_model(url)
    assert {name: tensor.dtype for name, tensor in model.items()} == dict.fromkeys(
        expected["model"], torch.float32
    )
    assert model["norm"].tolist() == [3.0, 3.0]


def _sharded(rank, value):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.size,))
    full = value * torch.arange(ROWS * 2.0).reshape(ROWS, 2)
    return {
        "model": {
            "sharded": distribute_tensor(full, mesh, [Shard(0)]),
            "same": torch.full((3,), value),
        }
    }


def _save_on(url, rank):
    import torch.distributed as dist

    live = _sharded(rank, 2.0)
    saved = DistributedCheckpoint().save(url, live, dist.new_group(backend="gloo"))
    live["model"]["sharded"].zero_()
    dist.all_reduce(torch.ones(1), group=rank.group)  # training goes on, on the group of its own
    saved.result()
    back = _sharded(rank, 0.0)
    DistributedCheckpoint().load(url, back, rank.group)
    return back["model"]["sharded"].full_tensor()


def test_shards_load_on_ranks_and_as_full_tensors_in_one_process(tmp_path):
    (tmp_path / "ranks").mkdir()
    expected = 2.0 * torch.arange(ROWS * 2.0).reshape(ROWS, 2)
    for back in run_ranks(2, partial(_save_on, str(tmp_path / "saved")), tmp_path / "ranks"):
        assert back.equal(expected)
    model = read_model(str(tmp_path / "saved"))
    assert model["sharded"].equal(expected)
    assert model["same"].tolist() == [2.0] * 3


def test_a_state_with_other_names_or_shapes_is_refused(tmp_path):
    store, url = DistributedCheckpoint(asynchronous=False), str(tmp_path / "policy")
    store.save(url, state(1.0), None).result()
    with pytest.raises(CheckpointError, match=r"policy could not be read.*model\.unknown"):
        store.load(url, {"model": {"unknown": torch.zeros(1)}}, None)
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight"):
        store.load(url, {"model": {"layers.0.weight": torch.zeros(4, 2)}}, None)


def test_a_checkpoint_is_never_overwritten(tmp_path):
    store, url = DistributedCheckpoint(), str(tmp_path / "policy")
    store.save(url, state(1.0), None).result()
    with pytest.raises(CheckpointError, match="could not be written"):
        store.save(url, state(2.0), None).result()
    assert read_model(url)["norm"].tolist() == [1.0, 1.0]


class Attack:
    """Makes the folder ``mark`` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_metadata_that_would_run_code_is_refused(tmp_path):
    url, mark = tmp_path / "policy", tmp_path / "mark"
    DistributedCheckpoint().save(str(url), state(1.0), None).result()
    (url / ".metadata").write_bytes(pickle.dumps(Attack(mark)))
    with pytest.raises(CheckpointError, match=r"not a checkpoint's metadata.*mkdir"):
        read_model(str(url))
    with pytest.raises(CheckpointError, match="mkdir"):
        DistributedCheckpoint().load(str(url), state(0.0), None)
    assert not mark.exists()


class ByName(pickle.Pickler):
    """Writes members of an Enum as Python before 3.11.4 does: an attribute of their class, by
    name.
    """

    def reducer_override(self, given):
        return (getattr, (type(given), given.name)) if isinstance(given, Enum) else NotImplemented


def test_a_checkpoint_written_by_an_older_python_loads(tmp_path):
    url = tmp_path / "policy"
    DistributedCheckpoint().save(str(url), state(1.0), None).result()
    described = pickle.loads((url / ".metadata").read_bytes())
    with (url / ".metadata").open("wb") as file:
        ByName(file).dump(described)
    assert b"getattr" in (url / ".metadata").read_bytes()
    assert read_model(str(url))["norm"].tolist() == [1.0, 1.0]


class AttributeOf:
    """Asks for an attribute of a class that metadata may name, when it is unpickled."""

    def __reduce__(self):
        return getattr, (metadata.StorageMeta, "__init__")


def test_metadata_that_asks_for_any_other_attribute_is_refused(tmp_path):
    url = tmp_path / "policy"
    DistributedCheckpoint().save(str(url), state(1.0), None).result()
    (url / ".metadata").write_bytes(pickle.dumps(AttributeOf()))
    with pytest.raises(
        CheckpointError, match=r"attribute '__init__' of .*StorageMeta.*describes no checkpoint"
    ):
        read_model(str(url))


def test_a_value_that_would_run_code_is_refused(tmp_path):
    url, mark = str(tmp_path / "policy"), tmp_path / "mark"
    DistributedCheckpoint(asynchronous=False).save(
        url, {"progress": {"steps": Attack(mark)}}, None
    ).result()
    assert not mark.exists()
    with pytest.raises(CheckpointError, match="could not be read"):
        DistributedCheckpoint().load(url, {"progress": {"steps": 0}}, None)
    assert not mark.exists()


def test_metadata_naming_files_in_other_folders_is_refused(tmp_path):
    url = tmp_path / "policy"
    DistributedCheckpoint().save(str(url), state(1.0), None).result()
    text = (url / ".metadata").read_bytes()
    (url / ".metadata").write_bytes(text.replace(b"__0_0.distcp", b"../secret.pt"))
    with pytest.raises(CheckpointError, match="not beside it"):
        read_model(str(url))


def test_a_missing_or_damaged_checkpoint_is_refused(url):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read_model(url)
    DistributedCheckpoint().save(url, {"progress": {"steps": 1}}, None).result()
    with pytest.raises(CheckpointError, match="holds no model"):
        read_model(url)
    fs, path = open_fs(f"{url}/.metadata")
    fs.pipe_file(path, fs.cat_file(path)[:40])
    with pytest.raises(CheckpointError, match="not a checkpoint's metadata"):
        read_model(url)
