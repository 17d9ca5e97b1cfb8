"""Puts vLLM to sleep while other roles compute on its accelerator, and wakes what is needed of it.

Level 1 moves the weights to the host's memory and frees the cache of keys and values. Level 2 frees
both: it is for weights that nobody will read again. The cache wakes when something is generated,
since a trainer beside the engine still holds its own weights while it gives them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from siirl_dask.context import Device
from siirl_dask.devices import accelerator
from siirl_dask.errors import RunError

_WEIGHTS = "weights"  # one of vLLM's tags, as the next
_CACHE = "kv_cache"
KEEPS_WEIGHTS = 1  # one of vLLM's levels, as the next
FREES_WEIGHTS = 2
_FULLER_CARD = "Memory usage increased after sleeping."  # of vLLM's assertion
logger = logging.getLogger("siirl_dask.rollout")


class VllmSleep:
    """Knows what of an engine is asleep. Does nothing at level 0, as on a CPU, where all memory
    is the host's.
    """

    def __init__(self, llm: Any, level: int, device: Device) -> None:
        """``level`` is the deepest one: 0, 1 or 2."""
        self._llm = llm
        self._level = level
        self._kind = device.kind
        if level and device.shared_by > 1:
            llm.collective_rpc(overlook_others)
        self._asleep = frozenset[str]()
        self._discarded = False  # the weights are gone, and no others have come
        self._copied = False  # the host has memory for a copy of the weights
        self._loose: list[tuple[Tensor, Tensor]] = []

    def begin(self, *, weights_follow: bool) -> None:
        """Free the device's memory. With ``weights_follow``, and at level 2, the weights are
        forgotten.
        """
        if not self._level or _WEIGHTS in self._asleep:
            return
        if weights_follow and self._level == FREES_WEIGHTS:
            (self._loose,) = self._llm.apply_model(_keep_loose)
            self._llm.sleep(FREES_WEIGHTS)
            self._discarded = True
            self._give_back_copy()
        else:
            self._llm.sleep(KEEPS_WEIGHTS)
            self._copied = True
        self._asleep = frozenset({_WEIGHTS, _CACHE})

    def wake_weights(self) -> None:
        """Take memory for the weights, which are about to be loaded; the cache sleeps on."""
        if _WEIGHTS not in self._asleep:
            return
        self._wake([_WEIGHTS])
        self._asleep -= {_WEIGHTS}
        _put_back(self._loose)
        self._loose = []

    def loaded(self) -> None:
        """Note that all weights were loaded."""
        self._discarded = False

    def end(self) -> None:
        """Wake up, to generate. RunError when the weights are gone and no new ones came."""
        if self._discarded:
            raise RunError(
                "vLLM let go of its weights (rollout.vllm.sleep_level=2) since a node was to load "
                "others before anything is generated, and something was asked of it before: use an "
                "engine in nodes of its own role alone, or give rollout.vllm.sleep_level=1"
            )
        if self._asleep:
            self._wake(None if _WEIGHTS in self._asleep else [_CACHE])
            self._asleep = frozenset()

    def _wake(self, tags: list[str] | None) -> None:
        """Wake what has one of vLLM's ``tags``, or all.

        What torch's allocator keeps for later of what trainers in this process had is freed: vLLM
        cannot take it.
        """
        accelerator.free_cache(self._kind)
        self._llm.wake_up(tags=tags)

    def _give_back_copy(self) -> None:
        """Free the host's memory that a copy of the weights had when the engine was built: torch
        would keep it.
        """
        if self._copied:
            accelerator.free_host_cache(self._kind)
        self._copied = False


def overlook_others(worker: Any) -> None:
    """Let a worker of vLLM sleep while others take memory of its card; called in that worker.

    vLLM compares the free memory of the whole card before and after, and fails where there is less:
    as where a trainer or an engine of another worker takes some meanwhile. Its own memory is free
    by then. Its executor must not see the failure, for it would hold the worker to be awake, and
    never wake it.
    """
    inner = getattr(worker, "worker", worker)  # vLLM's executor has it in a wrapper
    inner.sleep = partial(_sleep_beside_others, inner.sleep)


def _sleep_beside_others(sleep: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        sleep(*args, **kwargs)
    except AssertionError as error:
        if error.args != (_FULLER_CARD,):
            raise
        logger.info(
            "vLLM sleeps; other workers of its card took more memory meanwhile than it gave back"
        )


def _keep_loose(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the model's tensors that no weights bring back, each with a copy in the host's memory.

    These are buffers, which some backends of vLLM keep themselves, and tensors that modules hold as
    plain attributes. Level 2 would leave anything in them.
    """
    with torch.inference_mode():
        return [
            (tensor, tensor.to("cpu", copy=True))
            for tensor in loose_tensors(model)
            if not tensor.is_meta
        ]


def loose_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield each tensor of the model once that is no parameter and no part of the cache of keys
    and values.
    """
    seen = {id(parameter) for parameter in model.parameters()}
    for module in model.modules():
        own = {
            name: value
            for name, value in vars(module).items()
            if name not in ("_parameters", "_modules", _CACHE)
        }
        for tensor in _tensors_in(own):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth:
        values = value.values() if isinstance(value, dict) else value
        yield from chain.from_iterable(_tensors_in(inner, depth - 1) for inner in values)


def _put_back(kept: list[tuple[Tensor, Tensor]]) -> None:
    with torch.inference_mode():
        for tensor, copy in kept:
            tensor.copy_(copy)
