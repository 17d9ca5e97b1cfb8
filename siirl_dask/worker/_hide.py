"""Hides broken packages; the process that workers are forked from imports this before transformers."""

from siirl_dask.models.broken_imports import hide

hide()
