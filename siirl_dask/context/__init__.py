"""The part of the system that a node function and a role's builder see."""

from siirl_dask.context.context import Codec, Context, Peers, RowStream, RowWork
from siirl_dask.context.device import Device, HoldsNoGroups, Rank
from siirl_dask.context.metrics import Metric, Reduce
from siirl_dask.devices import DeviceKind

__all__ = [
    "Codec",
    "Context",
    "Device",
    "DeviceKind",
    "HoldsNoGroups",
    "Metric",
    "Peers",
    "Rank",
    "Reduce",
    "RowStream",
    "RowWork",
]
