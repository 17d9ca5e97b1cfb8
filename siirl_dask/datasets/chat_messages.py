"""Makes chat messages of a column of texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatColumn:
    """A column of chat messages that is made of one of texts."""

    name: str
    """Name of the new column."""
    path: str
    """Path of the texts in the source: see column_paths.py."""
    system: str | None = None
    """Text of a system's message before each user's message; None for no such message."""


def as_messages(texts: pa.ChunkedArray, system: str | None = None) -> pa.Array:
    """Return each text as a user's message, in a list with the system's message where there is one.
    A null text gives a null. [N] -> [N]
    """
    contents = texts.cast(pa.string()).combine_chunks()
    count = len(contents)
    messages_each = 1
    roles = pa.repeat("user", count)
    if system is not None:
        messages_each = 2
        # message 2i is the system's, message 2i+1 the user's of row i
        places = np.zeros(2 * count, np.int64)
        places[1::2] = np.arange(1, count + 1)
        contents = pa.concat_arrays([pa.array([system], pa.string()), contents]).take(places)
        roles = pa.concat_arrays([pa.array(["system"]), roles]).take(places)
    messages = pa.StructArray.from_arrays([roles, contents], fields=list(MESSAGES.value_type))
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * messages_each)
    nulls = pc.is_null(texts).combine_chunks()
    return pa.ListArray.from_arrays(offsets, messages, type=MESSAGES, mask=nulls)
