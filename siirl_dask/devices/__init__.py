"""The one door to devices: whatever differs between CPUs, GPUs and NPUs is here, and nothing else
names them.

``kinds`` has what is known without torch, as a table; ``accelerator`` asks torch; ``profiler``
makes each kind's own. ``plugin`` says why torch cannot be imported where a kind's plug-in for it is
broken. Importing this package imports no torch.
"""

from siirl_dask.devices.kinds import (
    ALLOCATOR_VARIABLES,
    BACKEND_PREFIXES,
    ENGINE_PACKAGES,
    ENGINE_VARIABLES,
    NO_ACCELERATORS,
    VISIBLE,
    DeviceKind,
    Traits,
    hidden_by,
    traits_of,
)
from siirl_dask.devices.plugin import check_plugins

__all__ = [
    "ALLOCATOR_VARIABLES",
    "BACKEND_PREFIXES",
    "ENGINE_PACKAGES",
    "ENGINE_VARIABLES",
    "NO_ACCELERATORS",
    "VISIBLE",
    "DeviceKind",
    "Traits",
    "accelerator",
    "check_plugins",
    "cpus",
    "fused",
    "hidden_by",
    "link_matrix",
    "machine_memory",
    "operators",
    "plugin",
    "profile_level",
    "profiler",
    "topology",
    "traits_of",
]
