"""The content of a dataset that was written of a Dask collection: a digest of its rows."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import pyarrow as pa
from siirl_storage import Part

CONTENT = "siirl.content"
"""Property of a table that was written of a collection: ``content_digest`` when it was written."""
TOKEN = "siirl.collection"
"""Property of such a table: Dask's token of the collection."""


def content_digest(schema: pa.Schema, parts: Iterable[Part]) -> str:
    """Return the SHA-256 of a table's rows, in their order and partitions: that of its schema, and
    of its files' digests, so names and times of files do not count.
    """
    digest = sha256()
    for field in schema:
        digest.update(f"{field.name}: {field.type}\n".encode())
    for part in parts:
        digest.update(f"{part.sha256} {part.rows}\n".encode())
    return digest.hexdigest()
