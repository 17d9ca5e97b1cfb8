"""Words for people who read: sizes, ranges of workers, aligned tables, and secrets left out."""

from siirl_dask.wording.redaction import REDACTED, redacted
from siirl_dask.wording.text_tables import (
    LEAST,
    readable_bytes,
    steps_behind,
    table,
    tables_within,
    worker_ranges,
)

__all__ = [
    "LEAST",
    "REDACTED",
    "readable_bytes",
    "redacted",
    "steps_behind",
    "table",
    "tables_within",
    "worker_ranges",
]
