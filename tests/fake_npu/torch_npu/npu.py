"""The module ``torch.npu``: devices, memory, seeds."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from torch_npu.calls import count

_MEMORY = 64 * 2**30
_current = threading.local()
_live = {}
_taken = {}


def _seen():
    _take_one()
    listed = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    everyone = int(os.environ.get("FAKE_NPU_COUNT", "8"))
    return everyone if listed is None else len([each for each in listed.split(",") if each.strip()])


def _take_one():
    """As a launcher does that shows each process one device: the next of those that
    ``FAKE_NPU_TAKEN`` counts.
    """
    folder, own = os.environ.get("FAKE_NPU_TAKEN"), os.getpid()
    if folder is None or _taken.get("by") == own:
        return
    for index in range(64):
        try:
            Path(folder, str(index)).touch(exist_ok=False)
        except FileExistsError:
            continue
        os.environ["ASCEND_RT_VISIBLE_DEVICES"], _taken["by"] = str(index), own
        return


def is_available():
    return _seen() > 0


def is_initialized():
    return True


def device_count():
    return _seen()


def current_device():
    return getattr(_current, "index", 0)


def set_device(device):
    index = torch.device(device).index if isinstance(device, str | torch.device) else device
    if not 0 <= index < _seen():
        raise RuntimeError(f"Invalid device ID: {index}, of {_seen()}")
    count("set_device")
    _current.index = index


def get_device_properties(device=None):
    return SimpleNamespace(name="Ascend910B2", total_memory=_MEMORY)


def get_device_name(device=None):
    return get_device_properties(device).name


def get_device_capability(device=None):
    return None


def memory_allocated(device=None):
    """Bytes of the storages of all tensors on the device."""
    index = current_device() if device is None else torch.device("npu", device).index
    alive = [
        found
        for kept in list(_live.values())
        if (found := kept()) is not None and found.device.index == index
    ]
    return sum(
        {
            raw.untyped_storage().data_ptr(): raw.untyped_storage().nbytes() for raw in _raws(alive)
        }.values()
    )


def _raws(tensors):
    return [tensor.raw for tensor in tensors]


def max_memory_allocated(device=None):
    return memory_allocated(device)


def mem_get_info(device=None):
    return _MEMORY - memory_allocated(device), _MEMORY


def empty_cache():
    count("empty_cache")


def synchronize(device=None):
    count("synchronize")


def manual_seed_all(seed):
    count("manual_seed_all")


def manual_seed(seed):
    count("manual_seed")


def _is_in_bad_fork():
    return False


def _lazy_init():
    pass


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]
