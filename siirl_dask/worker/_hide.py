"""Imported first by the process that workers are forked from, before what it preloads imports transformers."""

from siirl_dask.models.broken_imports import hide

hide()
