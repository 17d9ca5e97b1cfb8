"""Memory and seconds of a run, estimated before it starts, and what a measured run says of them."""

from siirl_dask.estimates.analysis import Analysis, Compared, analyze, mean_lengths
from siirl_dask.estimates.computing_seconds import StepTokens
from siirl_dask.estimates.device_memory import (
    Cards,
    cards_of,
    check_devices,
    device_memory,
    footprints_of,
)
from siirl_dask.estimates.links import EdgeLinks, Links, links_of, total_of
from siirl_dask.estimates.memory import WorkerMemory, check_memory, memory_of, sizes_of
from siirl_dask.estimates.memory_shortage import MemoryShortage, find_shortage
from siirl_dask.estimates.performance import Split, StepTime, lengths_of, splits, step_time
from siirl_dask.estimates.speeds import Speed, note_on_float32, speed_of
from siirl_dask.estimates.worker_devices import (
    assign_devices,
    describe_links,
    describe_nodes,
    describe_worker_devices,
    find_worker_devices,
    worker_devices_as_data,
)

__all__ = [
    "Analysis",
    "Cards",
    "Compared",
    "EdgeLinks",
    "Links",
    "MemoryShortage",
    "Speed",
    "Split",
    "StepTime",
    "StepTokens",
    "WorkerMemory",
    "analyze",
    "assign_devices",
    "cards_of",
    "check_devices",
    "check_memory",
    "describe_links",
    "describe_nodes",
    "describe_worker_devices",
    "device_memory",
    "find_shortage",
    "find_worker_devices",
    "footprints_of",
    "lengths_of",
    "links_of",
    "mean_lengths",
    "memory_of",
    "note_on_float32",
    "sizes_of",
    "speed_of",
    "splits",
    "step_time",
    "total_of",
    "worker_devices_as_data",
]
