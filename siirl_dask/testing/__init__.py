"""Shipped for those who write engines, trainers or transports: conformance suites, tiny models,
tiny tasks.
"""

from siirl_dask.models.broken_imports import hide

hide()
