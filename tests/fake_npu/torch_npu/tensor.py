"""Tensors on the device. Each holds one on the CPU; operators run on these, and refuse a mixture
of devices.
"""

import weakref
from functools import partial

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torch_npu import npu
from torch_npu.calls import calls

_aten = torch.ops.aten
# take both devices
_MOVES = ("copy_", "_copy_from", "_to_copy", "_foreach_copy_", "index_put_", "_index_put_impl_")
_NO_DOUBLE = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "softmax",
    "scaled_dot_product",
)
"""Parts of names of operators for which CANN has no kernel in float64."""


class NpuTensor(torch.Tensor):
    """A tensor on an NPU; ``raw`` is the memory."""

    @staticmethod
    def __new__(cls, raw, index):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("npu", index),
        )
        made.raw = raw
        number = id(made)
        npu._live[number] = weakref.ref(made, lambda _: npu._live.pop(number, None))
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return call(function, *args, **(kwargs or {}))

    def __repr__(self):
        return f"NpuTensor({self.raw!r}, device={self.device})"

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to "
                "copy it"
            )
        return self.cpu().numpy()


def call(function, *args, **kwargs):
    """Run an operator on the CPU's tensors, and give back tensors of the device where it would
    compute.
    """
    if function.namespace == "c10d":
        from torch_npu.hccl import collective

        return collective(function, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    name = function.__name__.partition(".")[0]
    ours = {id(leaf.raw): leaf for leaf in leaves if isinstance(leaf, NpuTensor)}
    asked = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    target = _target(function, name, leaves, ours, asked)
    _refuse_double(function, name, leaves)
    calls["operators"] += 1
    plain = [_plain(leaf) for leaf in leaves]
    bare_args, bare_kwargs = tree_unflatten(plain, spec)
    out = function(*bare_args, **bare_kwargs)
    if target is None:
        return out
    return tree_map(
        lambda each: _wrapped(each, ours, target) if isinstance(each, torch.Tensor) else each, out
    )


def _plain(leaf):
    if isinstance(leaf, NpuTensor):
        return leaf.raw
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "npu" else leaf


def _wrapped(out, ours, target):
    return ours[id(out)] if id(out) in ours else NpuTensor(out, target)


def _target(function, name, leaves, ours, asked):
    """The index of the device of what comes out; None for the CPU."""
    if asked is not None:
        if asked.type != "npu":
            return None
        index = npu.current_device() if asked.index is None else asked.index
        if not 0 <= index < npu.device_count():
            raise RuntimeError(f"Invalid device ID: {index}, of {npu.device_count()}")
        return index
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if name in _MOVES:
        first = tensors[0]
        return first.device.index if isinstance(first, NpuTensor) else None
    devices = {each.device for each in tensors if each.dim() or isinstance(each, NpuTensor)}
    if len(devices) > 1 and not ("index" in name or "select" in name or "gather" in name):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{sorted(map(str, devices))}! ({function})"
        )
    return next(iter(ours.values())).device.index if ours else npu.current_device()


def _refuse_double(function, name, leaves):
    tensors = [leaf for leaf in leaves if isinstance(leaf, NpuTensor)]
    if any(part in name for part in _NO_DOUBLE) and any(
        each.dtype == torch.float64 for each in tensors
    ):
        raise RuntimeError(f"call aclnn of {function} failed: DT_DOUBLE is not supported")


_anything = torch.library.Library("_", "IMPL")
_anything.fallback(call, "PrivateUse1")
_made = torch.library.Library("aten", "IMPL")
for _name in ("empty.memory_format", "empty_strided", "copy_", "_to_copy"):
    _operator = getattr(
        getattr(_aten, _name.partition(".")[0]), _name.partition(".")[2] or "default"
    )
    _made.impl(_name, partial(call, _operator), "PrivateUse1")


def _keeping_ties(self, fn, recurse=True):
    """``Module._apply``, by which modules move, with parameters tied as before.

    It gives new parameters to a module that goes to a device of Python's: to one of C++, it gives
    them other memory.
    """
    places = {}
    for module in self.modules():
        for key, parameter in module._parameters.items():
            places.setdefault(id(parameter), []).append((module._parameters, key))
    moved = _apply(self, fn, recurse)
    for (first, name), *others in places.values():
        for parameters, key in others:
            parameters[key] = first[name]
    return moved


_apply, torch.nn.Module._apply = torch.nn.Module._apply, _keeping_ties
