"""Policies on a device, whole and in shards (FSDP2), against a CPU; their checkpoints; and
weights between devices.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices.accelerator import allocated_bytes
from siirl_dask.nodes.weight_rows import Parameter
from siirl_dask.nodes.weights import _parameter_index
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import devices_of, run_ranks
from siirl_dask.testing.rows import assert_same_tensors, copied_weights, random_rows, signs
from siirl_dask.testing.trainers import TrainerTests
from siirl_dask.training import TrainBatch, build_trainer
from siirl_dask.training.files.checkpoint import DistributedCheckpoint, read_model
from siirl_dask.worker.groups.process_groups import backend_of, broadcast_group
from siirl_dask.worker.stop import StopFlag
from tests.gpu import devices
from tests.settings import trainer_config

pytestmark = pytest.mark.gpu
LONG = ((30, 98), (1, 60), (30, 98), (9, 1), (5, 0), (20, 110))
"""Rows of some length, so that kernels for packed rows are used as in a run."""
TOLERANCE = {Dtype.float32: 1e-3, Dtype.bfloat16: 7e-2}
"""Difference of log-probs from those of a CPU in float32; TF32 is off in torch by default."""


def policy(
    folder,
    *,
    backend="torch",
    dtype=Dtype.float32,
    rank=None,
    device=None,
    config=None,
    temperature=0.7,
):
    return build_trainer(
        device or devices.device(rank),
        rank or Rank(),
        model=ModelConfig(path=str(folder), dtype=dtype),
        trainer=config or TrainerConfig(lr=1e-4, backend=backend),
        rollout=RolloutConfig(temperature=temperature),
    )


def learn(trainer, lengths=LONG, only=None):
    rows = random_rows(lengths, only)
    logprobs = trainer.logprobs(rows).logprobs
    batch = TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )
    return trainer.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("policy") / "model"
    return tiny_model(where, seed=1, hidden=128, layers=4, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def on_a_cpu(folder):
    trainer = policy(folder, device=Device("w0"))
    return learn(trainer), trainer.logprobs(random_rows(LONG))


class OnDevice(TrainerTests):
    backend = "torch"

    @classmethod
    def make_trainer(cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank):
        return policy(
            folder, rank=rank, config=replace(config, backend=cls.backend), temperature=temperature
        )

    @classmethod
    def device_kind(cls):
        return devices.kind()

    @pytest.fixture(autouse=True)
    def repeatable(self):
        """Sums on a GPU take the same order in every call, where torch has kernels for that."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


class TestWholePolicy(OnDevice):
    """The conformance suite of trainers; where there is one device, two ranks share it, over
    gloo.
    """


class TestShardedPolicy(OnDevice):
    """The conformance suite of trainers over FSDP2, on NCCL where there are two devices."""

    backend = "fsdp"
    devices_of_two_ranks = 2


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_a_policy_scores_and_learns_as_on_a_cpu(folder, on_a_cpu, backend, dtype):
    trainer, (metrics, after) = policy(folder, backend=backend, dtype=dtype), on_a_cpu
    assert {tensor.device.type for _, tensor in trainer.weights()} == {str(devices.kind())}
    got, tolerance = learn(trainer), TOLERANCE[dtype]
    scores = trainer.logprobs(random_rows(LONG))
    assert_close(scores.logprobs, after.logprobs, atol=tolerance, rtol=0)
    assert_close(scores.entropy, after.entropy, atol=tolerance, rtol=0)
    assert got["loss"] == pytest.approx(metrics["loss"], abs=tolerance)
    assert got["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=tolerance)


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_a_checkpoint_of_a_device_is_what_the_policy_was_when_it_was_saved(
    folder, tmp_path, backend
):
    trainer, url = policy(folder, backend=backend), str(tmp_path / "policy")
    learn(trainer)
    saved, weights = (
        DistributedCheckpoint().save(url, trainer.state(), None),
        copied_weights(trainer),
    )
    learn(trainer)  # while it is written
    assert saved.result()
    again = policy(folder, backend=backend)
    state = again.state()
    DistributedCheckpoint().load(url, state, None)
    again.load_state(state)
    assert_same_tensors(copied_weights(again), weights)
    assert_same_tensors(read_model(url), weights)
    learn(again)
    assert learn(again)["loss"] == pytest.approx(learn(trainer)["loss"], abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "torch", "park": True},
        {"backend": "fsdp", "park": True},
        {"backend": "fsdp", "offload": True},
        {"backend": "torch", "gradient_checkpointing": True},
        {"backend": "fsdp", "gradient_checkpointing": True},
    ],
    ids=lambda settings: f"{settings['backend']}-{list(settings)[1]}",
)
def test_a_policy_that_saves_memory_learns_as_one_that_does_not(folder, settings):
    plain = policy(folder, backend=settings["backend"])
    saving = policy(folder, config=trainer_config(lr=1e-4, **settings))
    for _ in range(2):
        expected = learn(plain)
        got = learn(saving)
        before = allocated()
        saving.sleep()
        assert got["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        if "park" in settings and devices.kind() is not DeviceKind.CPU:
            weights = sum(tensor.nbytes for tensor in saving.state()["model"].values())
            assert before - allocated() >= weights
    scores = saving.logprobs(random_rows(LONG)).logprobs
    assert_close(scores, plain.logprobs(random_rows(LONG)).logprobs, atol=1e-3, rtol=0)


def allocated():
    """Return the bytes of the device that torch has allocated in this process; 0 on a CPU."""
    if devices.kind() is DeviceKind.CPU:
        return 0
    return allocated_bytes(devices.kind(), devices.device().index)


def _shards_learn_and_save(folder, url, dtype, rank):
    trainer, rows = (
        policy(folder, backend="fsdp", dtype=dtype, rank=rank),
        range(rank.rank, len(LONG), rank.size),
    )
    metrics = learn(trainer, only=rows)
    saved = DistributedCheckpoint().save(url, trainer.state(), rank.side_group)
    return [
        metrics["loss"],
        metrics["grad_norm"],
        trainer.logprobs(random_rows(LONG)).logprobs,
        len(saved.result()),
    ]


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_two_shards_learn_as_one_cpu_and_save_what_one_device_loads(
    folder, on_a_cpu, tmp_path, dtype
):
    """They share a device where there is one, over gloo."""
    url, (metrics, after), tolerance = str(tmp_path / "policy"), on_a_cpu, TOLERANCE[dtype]
    (tmp_path / "ranks").mkdir()
    work = partial(_shards_learn_and_save, folder, url, dtype)
    for loss, norm, logprobs, files in run_ranks(2, work, tmp_path / "ranks", devices.kind()):
        assert loss == pytest.approx(metrics["loss"], abs=tolerance)
        assert norm == pytest.approx(metrics["grad_norm"], rel=tolerance)
        assert_close(logprobs, after.logprobs, atol=tolerance, rtol=0)
        assert files
    alone = policy(folder)
    state = alone.state()
    DistributedCheckpoint().load(url, state, None)
    alone.load_state(state)
    assert_close(alone.logprobs(random_rows(LONG)).logprobs, after.logprobs, atol=tolerance, rtol=0)


MODEL = [
    ("small", (7,)),
    *((f"layer {number}", (1024, 2048)) for number in range(8)),
    ("odd", (33, 5)),
]


def _broadcast(rank):
    """Send tensors from the first rank to the others, twice: the first time is nccl's own start."""
    from siirl_dask.worker.weight_broadcast import Broadcast  # imports Dask

    members = devices_of(rank.size, devices.kind())
    own = members[f"w{rank.rank}"]
    group = broadcast_group(own.worker, members, list(members), 60.0)
    tensors = [
        torch.full(shape, 1.0 + number, device=own.torch_name)
        for number, (_, shape) in enumerate(MODEL)
    ]
    index: pa.Table = _parameter_index(
        [Parameter.of(name, tensor) for (name, _), tensor in zip(MODEL, tensors, strict=True)]
    )
    way = Broadcast(
        members=tuple(members),
        group=group,
        device=own.torch_name,
        stop=StopFlag(),
        max_bytes=16 * 2**20,
    )
    for _ in range(2):
        began = time.perf_counter()
        if rank.rank == 0:
            way.send(index, iter(tensors), nullcontext)
            came = tensors
        else:
            came = [tensor.clone() for tensor in way.receive(index, nullcontext)]
        devices.finish()
        seconds = time.perf_counter() - began
    return [
        [float(tensor.min()) for tensor in came],
        [float(tensor.max()) for tensor in came],
        seconds,
    ]


@pytest.mark.gpu(packages=["distributed"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpu(devices=4))])
def test_weights_go_by_broadcast_from_one_device_to_the_others(tmp_path, tell, size):
    """Two ranks share a device where there is one, over gloo."""
    backend = backend_of(devices_of(size, devices.kind()).values())
    results = run_ranks(size, _broadcast, tmp_path, devices.kind())
    expected = [1.0 + number for number in range(len(MODEL))]
    assert all(low == high == expected for low, high, _ in results)
    slowest, nbytes = (
        max(seconds for *_, seconds in results),
        sum(4 * torch.Size(shape).numel() for _, shape in MODEL),
    )
    tell(
        f"broadcast of {nbytes / 2**20:.0f} MiB to {size - 1} over {backend}: "
        f"{nbytes / slowest / 1e9:.2f} GB/s"
    )
