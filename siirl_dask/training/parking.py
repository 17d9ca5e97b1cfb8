"""Parks a trained model in the host's memory while other roles compute on its device
(``trainer.park``).

Only memory moves: a tensor's storage shrinks to nothing, and grows again when its bytes come back.
Modules, FSDP, the optimizer and views of the tensor keep referring to it, so AdamW steps on the
device as ever, and a model that was parked is the same to the last bit. The host's memory is
allocated once; beside an accelerator it is pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from siirl_dask.devices import accelerator
from siirl_dask.devices.accelerator import host_memory
from siirl_dask.training.learner import Learner
from siirl_dask.training.parallel.dtensor import like_dtensor, local


class Parked:
    """Tensors that lie on their device, or wait in the host's memory. Each is alone in its
    storage, but for views.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        parts = [part for part in map(local, tensors) if part.numel()]
        self._storages = {_key(part): part.untyped_storage() for part in parts}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        self._copies: Mapping[int, Tensor] = {}
        self._stale = True
        self._waiting = False

    def park(self) -> None:
        """Free the device's memory; what has changed since it was last on the device is copied."""
        if self._waiting:
            return
        if self._stale:
            pinned = any(
                accelerator.pins_host_memory(storage.device) for storage in self._storages.values()
            )
            if not self._copies:
                self._copies = host_memory(self._sizes, pinned=pinned)
            for key, storage in self._storages.items():
                self._copies[key].copy_(_bytes(storage), non_blocking=pinned)
            _synchronize(self._storages.values())
        for storage in self._storages.values():
            storage.resize_(0)
        self._stale = False
        self._waiting = True

    def fetch(self) -> None:
        """Bring the bytes back to the device, if they are not there."""
        if not self._waiting:
            return
        for key, storage in self._storages.items():
            storage.resize_(self._sizes[key])
            _bytes(storage).copy_(self._copies[key], non_blocking=True)
        self._waiting = False

    def changed(self) -> None:
        """Note that the tensors get other values on the device; while they wait, the copies
        count as they are.
        """
        self._stale = not self._waiting

    def close(self) -> None:
        """Let go of the host's memory.

        Copies from it may be under way still, and torch's allocator does not know of them, since
        they were made from views of that memory: it would give it to the next who asks.
        """
        if self._copies:
            _synchronize(self._storages.values())
        self._copies = {}
        self._storages = {}

    def here(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` itself, or while it waits the same over the host's copy."""
        part = local(tensor)
        copy = None
        if self._waiting:
            copy = self._copies.get(_key(part))
        if copy is None:
            return tensor
        flat = copy.view(part.dtype)
        return like_dtensor(
            tensor, flat.as_strided(part.size(), part.stride(), part.storage_offset())
        )


class Scratch:
    """A tensor's memory that is only taken while somebody needs it; its values do not outlive
    that.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._size = self._storage.nbytes()

    def free(self) -> None:
        """Give the memory back."""
        self._storage.resize_(0)

    def take(self) -> None:
        """Take the memory, with any values in it."""
        if not self._storage.nbytes():
            self._storage.resize_(self._size)


class ModelMemory:
    """The memory of a model's weights, its optimizer's state and its gradients: says which of them
    must be there.

    Without ``park`` all of it stays on the device.
    """

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        learner: Learner | None,
        *,
        park: bool,
    ) -> None:
        """``weights`` have been made parkable before the learner was built."""
        self._weights = Parked(weights if park else ())
        state: Iterable[Tensor] = ()
        if park and learner is not None:
            state = learner.optimizer.state_tensors()
        self._state = Parked(state)
        self._gradients = None
        if park and learner is not None:
            self._gradients = Scratch(learner.optimizer.gradients.flat)

    def score(self) -> None:
        """Have the weights on the device."""
        self._weights.fetch()

    def begin_update(self) -> None:
        """Have everything on the device. The gradients begin with any values."""
        self._weights.fetch()
        self._state.fetch()
        if self._gradients is not None:
            self._gradients.take()

    def end_update(self) -> None:
        """Note that weights and state have changed, and leave the weights alone on the device, for
        who asks for them.

        An engine on the device may take memory for new weights now.
        """
        self.loaded()
        self.rest_state()

    def average(self) -> None:
        """Have weights and moving averages on the device."""
        self._weights.fetch()
        self._state.fetch()

    def loaded(self) -> None:
        """Note that weights and state were replaced where they are."""
        self._weights.changed()
        self._state.changed()

    def rest(self) -> None:
        """Free the device's memory."""
        self._weights.park()
        self.rest_state()

    def close(self) -> None:
        """Let go of the host's memory; nothing else is possible then."""
        self._weights.close()
        self._state.close()

    def where_it_is(self, state: Any) -> Any:
        """Return a state of nested mappings with the tensors that count: those that wait are the
        host's copies.
        """
        if isinstance(state, Tensor):
            return self._weights.here(self._state.here(state))
        if isinstance(state, Mapping):
            return {name: self.where_it_is(inner) for name, inner in state.items()}
        return state

    def rest_state(self) -> None:
        """Free the device's memory of all but the weights."""
        self._state.park()
        if self._gradients is not None:
            self._gradients.free()


@torch.no_grad()
def make_parkable(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter memory of its own where it lies in a file's, or beside others. FSDP's
    shards are alone.
    """
    for parameter in parameters:
        storage = local(parameter).untyped_storage()
        if not isinstance(parameter, DTensor) and (
            not storage.resizable() or storage.nbytes() != parameter.nbytes
        ):
            parameter.data = parameter.data.clone()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[UntypedStorage]) -> None:
    """Wait until copies from accelerators have arrived."""
    for device in {storage.device for storage in storages}:
        accelerator.synchronize(device)
