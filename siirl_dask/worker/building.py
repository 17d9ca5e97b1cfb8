"""What a worker's roles are, built one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.planner import Role


def build_roles(roles: Sequence[Role], device: Device, ranks: Mapping[str, Rank]) -> dict[str, Any]:
    """What each role that this worker has a rank in builds, in the order of ``ranks``, which is that of its peers too.

    On an accelerator whatever has a ``sleep()`` sleeps while the next are built: an engine that is awake would hold the
    memory they load into. It wakes by itself when it is asked for something.
    """
    build = {role.name: role.build for role in roles}
    resources: dict[str, Any] = {}
    for name, rank in ranks.items():
        resources[name] = resource = build[name](device, rank)
        last = len(resources) == len(ranks)
        if not last and device.kind is not DeviceKind.CPU and (sleep := getattr(resource, "sleep", None)):
            sleep()
    return resources
