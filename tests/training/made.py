"""Counts what torch allocates."""

from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Sizes of the tensors that operations make inside the ``with`` block, and the most bytes of
    them at a time.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and (storage := tensor.untyped_storage())._cdata not in given
            ):
                self.sizes.append(tensor.numel())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                finalize(storage, self._forget, storage.nbytes())
        return result

    def _forget(self, size):
        self.live -= size
