"""Autocast on the device: products are computed in the lower type, all else as it comes."""

from functools import partial

import torch
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
_KEY = "AutocastPrivateUse1"
_excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _lowered(operator, *args, **kwargs):
    dtype = torch.get_autocast_dtype("npu")

    def lower(each):
        fits = (
            isinstance(each, torch.Tensor)
            and each.is_floating_point()
            and each.dtype != torch.float64
        )
        return each.to(dtype) if fits else each

    with torch._C._ExcludeDispatchKeyGuard(_excluded):
        return operator(*tree_map(lower, args), **tree_map(lower, kwargs))


_rest = torch.library.Library("_", "IMPL")
_rest.fallback(torch.library.fallthrough_kernel, _KEY)
_products = torch.library.Library("aten", "IMPL")
for _name in _PRODUCTS:
    _products.impl(_name, partial(_lowered, getattr(_aten, _name).default), _KEY)
