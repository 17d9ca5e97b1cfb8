"""An image as a row holds it, bytes or a URL, and the column of images in the layouts that
datasets have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.errors import DataError, ImageError
from siirl_dask.schema import IMAGES, TYPES

_DATA = "bytes"  # name of a field, as in the feature Image of `datasets`
_PATH = "path"
_ENTRY = TYPES[IMAGES].value_type
_EXPECTED = (
    "bytes, a URL, a struct of bytes and path (the feature Image of `datasets`), or a list of one "
    "of these"
)


@dataclass(frozen=True)
class Image:
    """An image file: its bytes, or where they can be read."""

    data: bytes | None = field(default=None, repr=False)
    """Content of the file. None: it is at ``path``."""
    path: str | None = None
    """A local path or any fsspec URL."""

    @cached_property
    def key(self) -> str:
        """Digest of the bytes; of an image that has none, of its URL."""
        if self.data is not None:
            return sha256(self.data).hexdigest()
        return sha256(f"url {self.path}".encode()).hexdigest()


def images_of(value: Sequence[Mapping[str, Any] | None] | None) -> tuple[Image, ...]:
    """Return a row's images, from its value in a column that ``normalised`` gave. ImageError for
    an entry of nulls.
    """
    images = []
    for number, entry in enumerate(value or (), 1):
        if entry is None or (entry[_DATA] is None and entry[_PATH] is None):
            raise ImageError(
                f"image {number} of {len(value or ())} is null: expected its bytes or its path"
            )
        images.append(Image(entry[_DATA], None if entry[_DATA] is not None else entry[_PATH]))
    return tuple(images)


def check_layout(kind: pa.DataType, subject: str) -> None:
    """Raise DataError, beginning with ``subject``, for a type that holds no images."""
    if not _is_image(kind.value_type if _is_list(kind) else kind):
        raise DataError(f"{subject} has type {kind}: expected images as {_EXPECTED}")


def _is_image(kind: pa.DataType) -> bool:
    is_null = pa.types.is_null
    if not pa.types.is_struct(kind):
        return bool(_is_bytes(kind) or _is_text(kind) or is_null(kind))
    fields = {one.name: one.type for one in kind}
    if _DATA not in fields and _PATH not in fields:
        return False
    data = fields.get(_DATA, pa.null())
    if not _is_bytes(data) and not is_null(data):
        return False
    path = fields.get(_PATH, pa.null())
    return bool(_is_text(path) or is_null(path))


def normalised(column: pa.ChunkedArray, name: str = IMAGES) -> pa.ChunkedArray:
    """Return a dataset's column of images as the data plane holds it: a list of ``{bytes, path}``
    in each row.

    An image that has both loses its path; a null row becomes an empty list, and null entries stay
    null. ``name`` is the column's name in the dataset, for the DataError that a column of another
    type raises.
    """
    check_layout(column.type, f"column {name!r}")
    return pa.chunked_array([_listed(chunk) for chunk in column.chunks], TYPES[IMAGES])


def _listed(array: pa.Array) -> pa.Array:
    if _is_list(array.type):
        entries = array.flatten()
        counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    else:
        entries = array.drop_null()
        counts = array.is_valid().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), _entries(entries))


def _entries(array: pa.Array) -> pa.Array:
    """Return images, one an element, as structs of bytes and path."""
    kind = array.type
    known = set()
    if pa.types.is_struct(kind):
        known = {kind.field(index).name for index in range(kind.num_fields)}
    data = pa.nulls(len(array))
    if _DATA in known:
        data = pc.struct_field(array, _DATA)
    elif _is_bytes(kind):
        data = array
    path = pa.nulls(len(array))
    if _PATH in known:
        path = pc.struct_field(array, _PATH)
    elif _is_text(kind):
        path = array
    data = data.cast(_ENTRY.field(_DATA).type)
    path = path.cast(_ENTRY.field(_PATH).type)
    path = pc.if_else(data.is_valid(), pa.scalar(None, path.type), path)
    return pa.StructArray.from_arrays([data, path], fields=list(_ENTRY), mask=array.is_null())


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
