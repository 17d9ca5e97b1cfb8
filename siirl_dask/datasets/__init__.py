"""Datasets: recipes for those that people use, and the import that they and ``siirl-dask data
import`` are made of.

A recipe is one line of a configuration: ``data.prepare: siirl_dask.datasets:gsm8k``.
"""

from siirl_dask.datasets.chat_messages import ChatColumn
from siirl_dask.datasets.destination import destination
from siirl_dask.datasets.importing import ImportRequest, PromptLengths, import_data, is_prompt
from siirl_dask.datasets.lengths import LengthDistribution, characters
from siirl_dask.datasets.mapping import ColumnMapping, parse_type
from siirl_dask.datasets.recipes import dapo_17k, geometry3k, gsm8k, math
from siirl_dask.datasets.token_lengths import longer_than, token_lengths_of

__all__ = [
    "ChatColumn",
    "ColumnMapping",
    "ImportRequest",
    "LengthDistribution",
    "PromptLengths",
    "characters",
    "dapo_17k",
    "destination",
    "geometry3k",
    "gsm8k",
    "import_data",
    "is_prompt",
    "longer_than",
    "math",
    "parse_type",
    "partitions",
    "summary",
    "token_lengths_of",
]
