"""Passes a worker's built roles from a run that has lost a worker to the next launch, which loads
only their states.

An object is reused if it is a ``KeepsGroups`` (as a ``HoldsNoGroups`` is), and its role is placed
on the same worker and device. In an elastic run its rank may be another one, or among more or
fewer. The DAG, and so builders and options, are the same: both runs are launches of one start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl_dask.context import Device, KeepsGroups
from siirl_dask.worker.roles.role_state import close_roles, has_state


@dataclass(frozen=True, slots=True)
class BuiltRoles:
    """The objects that a run has built on one worker, by role."""

    device: Device
    resources: Mapping[str, Any]

    def reusable(
        self, worker: str, placement: Mapping[str, Sequence[str]], *, resumes: bool
    ) -> BuiltRoles:
        """Return the objects that the next launch can reuse, which have left their process groups;
        close all others.

        ``placement`` has the workers of each role. ``resumes`` says whether a checkpoint will be
        loaded: without one an object with a state, such as a trainer, must be built again.
        """
        reused = {}
        for name, resource in self.resources.items():
            if worker not in placement.get(name, ()) or not isinstance(resource, KeepsGroups):
                continue
            if not resumes and has_state(resource):
                continue
            if resource.leave_groups():
                reused[name] = resource
        close_roles(
            {name: resource for name, resource in self.resources.items() if name not in reused}
        )
        return BuiltRoles(self.device, reused)

    def for_device(self, device: Device) -> Mapping[str, Any]:
        """Return the objects if they are on ``device``; close them otherwise."""
        if device == self.device:
            return self.resources
        close_roles(self.resources)
        return {}
