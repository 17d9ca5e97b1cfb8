"""A training step asks of its process groups nothing that gloo, NCCL and HCCL do not all have."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from siirl_dask.algorithms import ppo_clip
from siirl_dask.collectives import all_sum
from siirl_dask.context import Rank
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import LENGTHS, random_rows, signs
from siirl_dask.training import TrainBatch
from siirl_dask.worker.groups.process_groups import RolePeers
from siirl_dask.worker.stop import StopFlag
from tests.settings import trainer_config
from tests.training.roles import policy

BACKENDS = {
    "torch": {"backend": "torch"},
    "torch, Muon": {"backend": "torch", "optimizer": "muon"},
    "fsdp": {"backend": "fsdp"},
    "fsdp, Muon": {"backend": "fsdp", "optimizer": "muon"},
    "fsdp, 2 replicas": {"backend": "fsdp", "shard_size": 1},
    "fsdp, sequence parallel": {"backend": "fsdp", "sequence_parallel": 2},
    "fsdp, tensor parallel": {"backend": "fsdp", "tensor_parallel": 2},
}
REDUCED = {torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
MOVED = REDUCED | {torch.uint8}
"""torch_npu's list of what HCCL reduces has neither uint8 nor float64, NCCL has no int16."""


class OnlyCommonTypes(TorchDispatchMode):
    """Refuses collectives of types that a backend lacks, and counts the others."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            allowed = REDUCED if "reduce" in func.name() else MOVED
            used = {
                leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            }
            assert used <= allowed, f"{func.name()} of {used}"
            self.seen += 1
        return func(*args, **(kwargs or {}))


def steps_with_common_types(folder, world):
    """Each backend's loss and norm, on groups of which one stands for a device's and one for the
    CPU's.
    """
    on_device, on_cpu = (dist.new_group([0, 1]) for _ in range(2))
    rank, results = Rank(world.rank, 2, on_device, cpu_group=on_cpu), {}
    for name, settings in BACKENDS.items():
        with OnlyCommonTypes() as refused:
            trainer = policy(folder, trainer_config(lr=1e-4, **settings), rank=rank)
            rows = random_rows(LENGTHS, range(2) if rank.rank == 0 else range(2, len(LENGTHS)))
            scores = trainer.logprobs(rows).logprobs
            batch = TrainBatch(
                rows=rows, old_logprobs=scores, advantages=signs(rows), rollout_logprobs=scores
            )
            metrics = trainer.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))
            RolePeers(rank, StopFlag()).all_gather(b"a message")
        results[name] = [metrics["loss"], metrics["grad_norm"], refused.seen]
    numbers = [[2.0**53, 0.1, float("inf"), 3.0], [1.0, 0.2, 1.0, float("nan")]][world.rank]
    return results, [
        all_sum(on_cpu, numbers),
        all_sum(on_cpu, numbers[:2], ranks=[1]),
        all_sum(on_cpu, []),
    ]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The steps of each backend, and some sums, on each of two ranks."""
    folder = tiny_model(tmp_path_factory.mktemp("model") / "model", seed=1, heads=2, kv_heads=2)
    return run_ranks(2, partial(steps_with_common_types, folder), tmp_path_factory.mktemp("ranks"))


def test_a_step_of_each_backend_reduces_no_float64(seen):
    (first, _), (second, _) = seen
    assert first == second
    for name, (loss, norm, collectives) in first.items():
        assert [loss, norm] == pytest.approx(first["torch"][:2], rel=1e-4, abs=1e-6), name
        assert collectives >= 5


def test_sums_are_those_of_float64_with_equal_bits_everywhere(seen):
    for _, (both, second, none) in seen:
        assert both[:3] == [2.0**53, 0.1 + 0.2, float("inf")]
        assert both[3] != both[3]
        assert second == [1.0, 0.2]
        assert none == []
    assert all_sum(None, [1, 0.25]) == [1.0, 0.25]
