"""The door to megatron-core: imports it without its warnings, and lets it run on CPUs and NPUs.

megatron-core's schedules put a counter on the device "cuda" whatever the model is on. On other
devices, and only inside ``on_device``, that name leads to the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from siirl_dask.devices import accelerator
from siirl_dask.errors import ConfigError
from siirl_dask.training.megatron import mindspeed

NEEDED = "pip install 'siirl_dask[megatron]'"


@contextmanager
def quietly() -> Iterator[None]:
    """Hide warnings inside the block: megatron-core warns of options of its own defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(operators: Mapping[str, str], kind: str) -> None:
    """Import megatron-core, once and quietly: it warns of each kernel library that is not
    installed. MindSpeed patches it first, where it has one of the ``operators`` on a device of this
    ``kind``.

    ConfigError when either is not there or does not import.
    """
    mindspeed.patch(operators, kind)
    try:
        with quietly():
            import megatron.core
            import megatron.core.models.gpt
            import megatron.core.models.gpt.gpt_layer_specs
            import megatron.core.pipeline_parallel.schedules  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"trainer.backend=megatron needs megatron-core ({error}): {NEEDED}"
        ) from error


def share_buffer() -> None:
    """Give megatron-core's layers the buffer in which they gather tokens: the one thing they
    keep for a process.
    """
    from megatron.core import parallel_state

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


class _On(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = self._device
        return func(*args, **kwargs)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Let megatron-core's schedules run on ``device`` inside the block."""
    if device.type == "cuda":
        yield
        return
    current = torch.cuda.current_device
    wait = torch.cuda.synchronize
    torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: accelerator.synchronize(device)
    try:
        with _On(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*CUDA_DEVICE_MAX_CONNECTIONS")
            yield
    finally:
        torch.cuda.current_device = current
        torch.cuda.synchronize = wait
