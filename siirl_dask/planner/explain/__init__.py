"""Bounds of the rows, bytes and memory that a plan takes, and the words for them; ``views/plan``
shows them.
"""

__all__ = ["device_memory"]
