"""The part of the system that a node function and a role's builder see."""

from siirl_dask.context.abilities import (
    Closes,
    KeepsGroups,
    SharesMemory,
    Sleeps,
    StandIn,
    behind,
    memory_of,
)
from siirl_dask.context.context import ArrivingWeights, Codec, Context, Peers, RowStream, RowWork
from siirl_dask.context.device import Device, HoldsNoGroups, Rank
from siirl_dask.context.metrics import Metric, Reduce
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
