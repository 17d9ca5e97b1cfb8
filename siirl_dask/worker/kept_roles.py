"""Hands a worker's built roles from a run that has lost a worker to the next one, which loads only their states.

An object is kept if it has ``leave_groups()`` and ``join_groups(rank)`` (see ``HoldsNoGroups``), and its role is still
on the worker, on the same device. In an elastic run its rank may be another one, or among more or fewer. The DAG, and
so builders and options, are the same: both runs are tries of one start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl_dask.context import Device
from siirl_dask.worker.role_state import close_roles, has_state


@dataclass(frozen=True, slots=True)
class BuiltRoles:
    """The objects that a run has built on one worker, by role."""

    device: Device
    resources: Mapping[str, Any]

    def sift(self, worker: str, placement: Mapping[str, Sequence[str]], *, resumes: bool) -> BuiltRoles:
        """Return those that may go on, without process groups, and close all others.

        ``placement`` has the workers of each role. ``resumes`` says whether a checkpoint will be loaded: without one an
        object with a state, such as a trainer, must begin anew.
        """
        kept = {}
        for name, resource in self.resources.items():
            stays = worker in placement.get(name, ())
            able = stays and hasattr(resource, "leave_groups") and (resumes or not has_state(resource))
            if able and resource.leave_groups():
                kept[name] = resource
        close_roles({name: one for name, one in self.resources.items() if name not in kept})
        return BuiltRoles(self.device, kept)

    def on(self, device: Device) -> Mapping[str, Any]:
        """Return the objects if they are on ``device``; close them otherwise."""
        if device == self.device:
            return self.resources
        close_roles(self.resources)
        return {}
