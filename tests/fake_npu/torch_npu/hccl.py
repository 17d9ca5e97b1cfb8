"""The backend ``hccl`` of torch.distributed, over gloo: collectives of tensors on NPUs alone, of
HCCL's types alone.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.utils._pytree import tree_leaves, tree_map

from torch_npu.calls import count

REDUCED = {
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
}
"""torch_npu's list of types that it reduces."""
_twins = {}


def _make(store, rank, size, timeout):
    """A backend for NPUs, and beside it a group that has it for CPUs, to which collectives are
    handed on.
    """
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = (
        [ProcessGroupGloo.create_device(hostname="127.0.0.1")],
        timeout,
    )
    backend = ProcessGroupGloo(store, rank, size, options)
    twin = ProcessGroup(store, rank, size)
    twin._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    twin._set_default_backend(ProcessGroup.BackendType.GLOO)
    _twins[backend] = twin
    return backend


def collective(function, args, kwargs):
    """Run one of torch's operators ``c10d::...`` on the memory of NPU tensors."""
    from torch_npu.tensor import NpuTensor

    name = function.__name__.partition(".")[0]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(each, NpuTensor) for each in tensors):
        raise RuntimeError(f"{name}: No backend type associated with device type cpu")
    refused = {each.dtype for each in tensors} - REDUCED if "reduce" in name else set()
    if refused:
        raise RuntimeError(f"HCCL {name}: unsupported data type {sorted(map(str, refused))}")
    count(f"hccl.{name}")
    ours = {id(each.raw): each for each in tensors}

    def plain(leaf):
        if isinstance(leaf, NpuTensor):
            return leaf.raw
        return _twin_of(leaf).boxed() if _is_group(leaf) else leaf

    out = function(*tree_map(plain, args), **tree_map(plain, kwargs))
    return tree_map(lambda each: ours[id(each)] if isinstance(each, torch.Tensor) else each, out)


def _is_group(leaf):
    return isinstance(leaf, torch.ScriptObject) and leaf._type().qualified_name().endswith(
        "ProcessGroup"
    )


def _twin_of(boxed):
    group = ProcessGroup.unbox(boxed)
    return _twins[group._get_backend(torch.device("npu"))]


dist.Backend.register_backend("hccl", _make, devices=["npu"])
