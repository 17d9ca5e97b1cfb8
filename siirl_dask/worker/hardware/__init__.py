"""A worker's device and CPUs: which it takes, and which it shares."""

__all__ = ["accelerators", "affinity", "devices"]
