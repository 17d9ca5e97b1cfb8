"""The committed parts of a run's tables, one by one, for readers that take them in parallel: such as
the partitions of a Dask collection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from siirl_storage import StorageError, join, open_fs, read_footer, read_rows

from siirl_dask.errors import DataError
from siirl_dask.runs.absent import hint_if_absent
from siirl_dask.runs.samples.rollouts import TABLE, saved_steps

STEP = "step"
"""int64. The step of a row, which the name of its folder says."""


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A part of a step that is whole."""

    url: str
    step: int

    def schema(self) -> pa.Schema:
        """Return the columns of its rows. DataError for a damaged part."""
        fs, path = open_fs(self.url)
        try:
            own = read_footer(fs, path).schema
        except (StorageError, FileNotFoundError) as error:
            raise DataError(f"{self.url!r} cannot be read: {error}") from error
        return own.remove_metadata().append(pa.field(STEP, pa.int64()))

    def read(self) -> pa.Table:
        """Return its rows, of which each has the ``step``. DataError for a damaged part, and for
        one that was removed meanwhile.
        """
        fs, path = open_fs(self.url)
        try:
            footer = read_footer(fs, path)
            groups = [
                read_rows(fs, path, group, footer.schema.names, footer.groups)
                for group in range(len(footer.groups))
            ]
        except (StorageError, FileNotFoundError) as error:
            raise DataError(f"{self.url!r} cannot be read: {error}") from error
        table = pa.concat_tables([footer.schema.empty_table(), *groups])
        table = table.replace_schema_metadata(None)
        return table.append_column(STEP, pa.array([self.step] * table.num_rows, pa.int64()))


def sample_parts(
    url: str, *, table: str = TABLE, steps: Sequence[int] | None = None
) -> list[SamplePart]:
    """Return the parts of every step that is whole in a table of the run at ``url``, or of those
    of ``steps``, in the order of the steps.

    DataError where there are none, and for storage that cannot be read.
    """
    try:
        fs, root = open_fs(join(url, table))
        whole = saved_steps(fs, root).whole
    except StorageError as error:
        raise DataError(str(error)) from error
    found = [
        SamplePart(join(url, table, part), step)
        for step, parts in whole.items()
        if steps is None or step in steps
        for part in parts
    ]
    if not found:
        raise DataError(
            f"{url!r} has no whole step in the table {table!r} yet: expected the folder of a run "
            f"that has finished a step{hint_if_absent(url)}"
        )
    return found
