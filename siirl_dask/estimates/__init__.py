"""Memory and seconds of a run, estimated before it starts, and what a measured run says of them."""

__all__ = [
    "analysis",
    "computing_seconds",
    "device_memory",
    "links",
    "memory",
    "memory_shortage",
    "performance",
    "speeds",
    "worker_devices",
]
