"""Records which column of a table holds the prompts' lengths in tokens, and of which tokenizer;
counts by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import FooterCache, RowGroup, Snapshot

from siirl_dask.errors import ConfigError

_PROPERTY = "token_lengths"
_READERS = 8  # parts read at once
# row groups that are read of a table with more: on an object store each is a round trip
_GROUPS = 256


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """A column with the length of each prompt in tokens."""

    column: str
    prompt: str
    """Column of the prompts; a dot leads into a struct."""
    tokenizer: str
    """Identity of the tokenizer: see ``HuggingFaceTokenizer.identity``."""
    rows: int
    """Rows of the table when the record was made: another number means that others appended rows
    of unknown lengths."""

    def as_properties(self) -> dict[str, str]:
        """Return the record as a property of the table."""
        return {_PROPERTY: json.dumps(asdict(self))}


def token_lengths_of(table: Snapshot) -> TokenLengths | None:
    """Return the record of a table; None where it has none that holds for all its rows."""
    found = _recorded(table)
    if found is None or found.rows != table.num_rows or found.column not in table.schema.names:
        return None
    if not pa.types.is_integer(table.schema.field(found.column).type):
        return None
    return found


def extended(found: TokenLengths, there: Snapshot | None) -> TokenLengths | None:
    """Return the record of ``found.rows`` rows for the table that they are appended to, or for a
    new one.

    None where lengths of the table's own rows are not known to be such. ConfigError if they are
    another tokenizer's.
    """
    if there is None:
        return found
    known = _recorded(there)
    if (
        known is not None
        and known.column == found.column
        and replace(known, rows=found.rows) != found
    ):
        raise ConfigError(
            f"--length-column {found.column}: that column of {there.url!r} has the lengths of "
            f"{known.prompt!r} by tokenizer {known.tokenizer[:8]}, and these would be of "
            f"{found.prompt!r} by {found.tokenizer[:8]}: give the same tokenizer and --prompt, or "
            "make another table"
        )
    holds = token_lengths_of(there)
    if holds is None or holds.column != found.column:
        return None
    return replace(found, rows=holds.rows + found.rows)


def longer_than(table: Snapshot, column: str, limit: int) -> list[tuple[int, int]]:
    """Return rows, and those whose value in ``column`` is above ``limit``, for each row group that
    was read: all of them, or some that are drawn, the same ones each time. StorageError where one
    cannot be read.
    """
    groups = table.row_groups()
    drawn = np.random.default_rng(0).permutation(len(groups))[:_GROUPS]
    chosen = [groups[index] for index in sorted(drawn)]
    parts = [list(own) for _, own in groupby(chosen, lambda group: group.part)]
    with ThreadPoolExecutor(_READERS) as pool:
        counted = pool.map(lambda own: list(_count(table, own, column, limit)), parts)
        return [count for counts in counted for count in counts]


def _count(
    table: Snapshot,
    groups: Sequence[RowGroup],
    column: str,
    limit: int,
) -> Iterator[tuple[int, int]]:
    footers = FooterCache()
    for group in groups:
        lengths = table.read_row_group(group, [column], footers=footers)[column]
        yield group.rows, pc.sum(pc.greater(lengths, limit)).as_py() or 0


def _recorded(table: Snapshot) -> TokenLengths | None:
    """Return what a table's property says; None for none, or for one that is no such record."""
    try:
        fields = json.loads(table.properties[_PROPERTY])
        kinds = {"column": str, "prompt": str, "tokenizer": str, "rows": int}
        if not isinstance(fields, Mapping) or any(
            type(fields[name]) is not kind for name, kind in kinds.items()
        ):
            return None
        return TokenLengths(**{name: fields[name] for name in kinds})
    except (KeyError, ValueError, RecursionError):
        return None
