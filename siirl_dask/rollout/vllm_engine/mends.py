"""Faults of vLLM 0.32 in a process that has other models as well, and on CPUs, that are passed by.

Import this after the process is prepared for vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any

from torch import Tensor, nn
from vllm.device_allocator import cumem
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.transformers import base as of_transformers

_MENDED = "_siirl_takes_heads"  # attribute of the function
_MAPS = "_siirl_maps_first"  # as the one before
_DECORATE = "support_torch_compile"


def rotate_heads_on_cpus() -> None:
    """Let vLLM's rotary embedding on CPUs take queries and keys [T, H, D], as LFM2 gives them: its
    kernel there takes [T, H * D], and makes other numbers of the rest, without a word.
    """
    own = RotaryEmbedding.forward_cpu
    if hasattr(own, _MENDED):
        return

    @wraps(own)
    def rotated(
        self: RotaryEmbedding,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if query.ndim == 2:
            return own(self, positions, query, key)  # type: ignore[no-any-return]
        flat_key = None if key is None else key.reshape(len(key), -1)
        new_query, new_key = own(self, positions, query.reshape(len(query), -1), flat_key)
        if key is not None:
            new_key = new_key.view(key.shape)
        return new_query.view(query.shape), new_key

    setattr(rotated, _MENDED, True)
    RotaryEmbedding.forward_cpu = rotated


def free_while_asleep() -> None:
    """Let the memory of an engine be freed while it sleeps, as where a run ends then.

    On CUDA vLLM unmaps memory when it falls asleep, and once more when it is freed. The driver
    refuses that, and vLLM's allocator keeps the error: it gives the process's next engine nothing
    (``error_code`` in csrc/cumem_allocator.cpp). So what is freed is mapped again before, a part at
    a time.
    """
    if not cumem.cumem_available:
        return
    allocator = cumem.CuMemAllocator.get_instance()
    own = allocator.python_free_callback
    if hasattr(own, _MAPS):
        return

    @wraps(own)
    def mapped(pointer: int) -> Any:
        data = allocator.pointer_to_data[pointer]
        # earlier releases do not say it
        if getattr(data, "is_asleep", False):
            data.is_asleep = False
            # where there is no room the driver refuses, as it would have
            with suppress(RuntimeError):
                cumem.create_and_map(data.handle)
        return own(pointer)

    setattr(mapped, _MAPS, True)
    allocator.python_free_callback = mapped


def rotary_places(model: nn.Module) -> int | None:
    """Return the tokens of a row for which all rotary embeddings have cosine and sine; None
    without any. vLLM reads past their end where a row is longer.
    """
    lengths = [
        len(module.cos_sin_cache)
        for module in model.modules()
        if isinstance(module, RotaryEmbedding) and hasattr(module, "cos_sin_cache")
    ]
    return min(lengths, default=None)


class SeparateClasses:
    """Within the ``with`` block vLLM may change classes of transformers; after it they are as they
    were, and modules that ``separate`` was called with have changed ones of their own.

    vLLM runs families that it has no code for by transformers' own (OLMo 2, SmolLM3, Phi), whose
    decoder's class it changes for its compiler. A trainer in the same process could neither build
    another model of that class, nor call one that it has.
    """

    def __init__(self) -> None:
        self._before: dict[type[nn.Module], tuple[tuple[type, ...], Mapping[str, Any]]] = {}
        self._own: dict[type[nn.Module], type[nn.Module]] = {}
        # a release that changes no classes there has no such function
        self._decorate: Callable[..., Any] | None = getattr(of_transformers, _DECORATE, None)

    def __enter__(self) -> SeparateClasses:
        if self._decorate is not None:
            setattr(of_transformers, _DECORATE, self._noting)
        return self

    def __exit__(self, *error: object) -> None:
        if self._decorate is not None:
            setattr(of_transformers, _DECORATE, self._decorate)
        for changed, (bases, attributes) in self._before.items():
            for name in _changed(changed, attributes):
                if name in attributes:
                    setattr(changed, name, attributes[name])
                else:
                    delattr(changed, name)
            changed.__bases__ = bases

    def separate(self, model: nn.Module) -> None:
        """Give the modules of a model that have a changed class a class of their own like it."""
        for module in model.modules():
            changed = type(module)
            if changed in self._before:
                module.__class__ = self._like(changed)

    def _noting(self, **options: Any) -> Any:
        assert self._decorate is not None
        decorate = self._decorate(**options)

        def decorate_noted(changed: type[nn.Module]) -> Any:
            self._before.setdefault(changed, (changed.__bases__, dict(vars(changed))))
            return decorate(changed)

        return decorate_noted

    def _like(self, changed: type[nn.Module]) -> type[nn.Module]:
        if changed not in self._own:
            bases, attributes = self._before[changed]
            added = [base for base in changed.__bases__ if base not in bases]
            own = {name: vars(changed)[name] for name in _changed(changed, attributes)}
            own["__module__"] = changed.__module__
            self._own[changed] = type(changed.__name__, (changed, *added), own)
        return self._own[changed]


def _changed(of: type, attributes: Mapping[str, Any]) -> list[str]:
    """Return the names of a class's own attributes that are others than they were."""
    return [
        name
        for name, value in vars(of).items()
        if name not in attributes or attributes[name] is not value
    ]
