"""The part of the system that a node function and a role's builder see."""

from siirl_dask.context.context import (
    ArrivingWeights,
    Codec,
    Context,
    Metric,
    Peers,
    Reduce,
    RowStream,
    RowWork,
)
from siirl_dask.context.device import (
    Closes,
    Device,
    HoldsNoGroups,
    KeepsGroups,
    Rank,
    SharesMemory,
    Sleeps,
    StandIn,
    behind,
    memory_of,
)
from siirl_dask.devices import DeviceKind

__all__ = [
    "ArrivingWeights",
    "Closes",
    "Codec",
    "Context",
    "Device",
    "DeviceKind",
    "HoldsNoGroups",
    "KeepsGroups",
    "Metric",
    "Peers",
    "Rank",
    "Reduce",
    "RowStream",
    "RowWork",
    "SharesMemory",
    "Sleeps",
    "StandIn",
    "behind",
    "memory_of",
]
