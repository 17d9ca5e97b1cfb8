"""Tables of rows: chosen without copies of the blobs that rows share, decoded, and read where a run
has stored them.
"""

from siirl_dask.tables.decoding import (
    decode_array,
    decode_column,
    decoded_column,
    needs_decoding,
    values_at,
)
from siirl_dask.tables.rows import (
    Ints,
    filled_by_group,
    missing_groups,
    once_per_group,
    one_of_each_group,
    rows_at,
    rows_where,
    split,
    with_values_of_groups,
)
from siirl_dask.tables.stored_rows import (
    read_kept_rows,
    read_stored_rows,
    step_folder,
    step_name,
    step_of,
)

__all__ = [
    "Ints",
    "content",
    "decode_array",
    "decode_column",
    "decoded_column",
    "filled_by_group",
    "missing_groups",
    "needs_decoding",
    "once_per_group",
    "one_of_each_group",
    "read_kept_rows",
    "read_stored_rows",
    "rows_at",
    "rows_where",
    "split",
    "step_folder",
    "step_name",
    "step_of",
    "values_at",
    "with_values_of_groups",
]
