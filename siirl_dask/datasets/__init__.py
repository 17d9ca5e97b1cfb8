"""Datasets: recipes for those that people use, and the import that they and ``siirl-dask data
import`` are made of.

A recipe is one line of a configuration: ``data.prepare: siirl_dask.datasets:gsm8k``.
"""

from siirl_dask.datasets.importing import ImportRequest, PromptLengths, import_data
from siirl_dask.datasets.mapping import ColumnMapping, parse_type
from siirl_dask.datasets.recipes import dapo_17k, geometry3k, gsm8k, math

__all__ = [
    "ColumnMapping",
    "ImportRequest",
    "PromptLengths",
    "chat_messages",
    "dapo_17k",
    "destination",
    "geometry3k",
    "gsm8k",
    "import_data",
    "lengths",
    "math",
    "parse_type",
    "partitions",
    "summary",
    "token_lengths",
]
