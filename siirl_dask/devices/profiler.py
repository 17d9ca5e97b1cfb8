"""Profilers of torch's kind, for the host and a device. A plug-in's devices have one of their
own.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from siirl_dask.devices.kinds import DeviceKind, traits_of
from siirl_dask.devices.profile_level import ProfileLevel

_LEVELS = {
    ProfileLevel.time: "Level0",
    ProfileLevel.memory: "Level1",
    ProfileLevel.stacks: "Level2",
}
"""How much of an NPU torch_npu's profiler looks at."""


class Profiler(Protocol):
    """A profiler of torch's kind."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> Any: ...


def make_profiler(kind: DeviceKind, level: ProfileLevel) -> Profiler:
    """Return a profiler of the host and of a device of this kind. ImportError where its plug-in
    is not there.
    """
    details: dict[str, Any] = {
        "record_shapes": level is not ProfileLevel.time,
        "profile_memory": level is not ProfileLevel.time,
        "with_stack": level is ProfileLevel.stacks,
    }
    plugin = traits_of(kind).plugin
    if plugin is not None:
        own: Any = importlib.import_module(plugin).profiler
        found: Profiler = own._KinetoProfile(
            activities=[own.ProfilerActivity.CPU, getattr(own.ProfilerActivity, kind.name)],
            experimental_config=own._ExperimentalConfig(
                profiler_level=getattr(own.ProfilerLevel, _LEVELS[level])
            ),
            **details,
        )
        return found
    activities = torch.profiler.ProfilerActivity
    both = dict.fromkeys([activities.CPU, getattr(activities, kind.name)])
    return torch.profiler.profile(activities=[*both], **details)
