"""An accelerator that workers see and that computes nothing: each thread has a current one, as
with CUDA.
"""

import threading
from functools import wraps
from types import SimpleNamespace

import torch

from siirl_dask.context import Device, DeviceKind
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.training.critic import ValueCritic
from siirl_dask.training.policy import Policy
from siirl_dask.worker.hardware import devices

NOT_BOUND = 5
CALLS = {
    TransformersEngine: ("serve", "load_weights", "close"),
    Policy: ("logprobs", "update", "state", "sleep", "close"),
}
BESIDE = {ValueCritic: ("update", "sleep")}  # where a run has one
_current, _seen = threading.local(), []


class FakeModule:
    """The part of ``torch.cuda`` that is asked for here."""

    @staticmethod
    def is_available():
        return False  # torch 2.11's torch.accelerator asks

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def get_device_properties(index):
        return SimpleNamespace()  # a driver that tells no place of the device on its host

    @staticmethod
    def set_device(index):
        _current.index = index

    @staticmethod
    def current_device():
        return getattr(_current, "index", NOT_BOUND)

    @staticmethod
    def empty_cache():
        _seen.append(("empty_cache", FakeModule.current_device(), threading.get_ident()))


def install():
    """Make this worker see one accelerator, the same as every other worker, and note where
    models are called.
    """
    devices.visible_devices = lambda: devices.VisibleDevices(DeviceKind.CUDA, ("the only one",))
    torch.get_device_module = lambda kind: FakeModule
    Device.torch_name = property(lambda self: "cpu")
    for kind, names in (CALLS | BESIDE).items():
        for name in names:
            setattr(kind, name, _noting(getattr(kind, name), f"{kind.__name__}.{name}"))


def _noting(method, name):
    @wraps(method)
    def noted(self, *args, **kwargs):
        _seen.append((name, FakeModule.current_device(), threading.get_ident()))
        return method(self, *args, **kwargs)

    return noted


def seen():
    """Name, current device and thread of each call."""
    return _seen
