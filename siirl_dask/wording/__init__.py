"""Words for people who read: sizes, ranges of workers, aligned tables, a user's own code, and
secrets left out.
"""

from siirl_dask.wording.redaction import REDACTED, redacted
from siirl_dask.wording.text_tables import (
    LEAST,
    readable_bytes,
    steps_behind,
    table,
    tables_within,
    worker_ranges,
)
from siirl_dask.wording.user_code import (
    bounded,
    exception_text,
    exception_text_with_place,
    function_label,
    function_with_place,
    value_text,
    without_addresses,
)

__all__ = [
    "LEAST",
    "REDACTED",
    "bounded",
    "exception_text",
    "exception_text_with_place",
    "function_label",
    "function_with_place",
    "readable_bytes",
    "redacted",
    "steps_behind",
    "table",
    "tables_within",
    "value_text",
    "without_addresses",
    "worker_ranges",
]
