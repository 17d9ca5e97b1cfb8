"""What a worker's roles are, built one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import format_exc
from typing import Any

from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.errors import RunError, SiirlError
from siirl_dask.planner import Role


def build_roles(roles: Sequence[Role], device: Device, ranks: Mapping[str, Rank]) -> dict[str, Any]:
    """What each role that this worker has a rank in builds, in the order of ``ranks``, which is that of its peers too.

    On an accelerator whatever has a ``sleep()`` sleeps while the next are built: an engine that is awake would hold the
    memory they load into. It wakes by itself when it is asked for something.

    What a role's build raises on purpose says which role and worker it was; anything else is a RunError that does.
    """
    build = {role.name: role.build for role in roles}
    resources: dict[str, Any] = {}
    for name, rank in ranks.items():
        with _named(name, device.worker):
            resources[name] = resource = build[name](device, rank)
        last = len(resources) == len(ranks)
        if not last and device.kind is not DeviceKind.CPU and (sleep := getattr(resource, "sleep", None)):
            sleep()
    return resources


@contextmanager
def _named(role: str, worker: str) -> Iterator[None]:
    """Whatever goes wrong inside is said to be of the role."""
    where = f"role {role!r}, worker {worker!r}"
    try:
        yield
    except SiirlError as error:
        error.add_note(f"in {where}")
        raise
    except Exception as error:
        failure = RunError(f"{where}: {type(error).__name__}: {error}")
        failure.add_note(format_exc())  # a traceback does not cross processes
        raise failure from error
