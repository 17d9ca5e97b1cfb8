"""Images of a table's rows as a trainer takes them: once for the rows of a group that show the same ones."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import torch

from siirl_dask.images import Image, images_of
from siirl_dask.schema import GROUP_ID, IMAGES, OBSERVED_IMAGES, PROMPT_IDS, TYPES
from siirl_dask.training import ObservedImage, RowImages


def row_images(table: pa.Table) -> RowImages | None:
    """Return the rows' images; None for a table without the columns, and for a dataset's own column of their name,
    which ``encode_prompts`` has not made. Rows without any show an empty tuple.

    Samples of a prompt have the same value, and where it is the same memory, comparing takes no time. Rows of a group
    may show other images than its first, as turns of an episode do.
    """
    has_images = IMAGES in table.column_names and table.schema.field(IMAGES).type == TYPES[IMAGES]
    observed = _observed(table)
    if not has_images and not observed:
        return None
    groups, shown, of_row = list[tuple[Image, ...]](), list[Any](), list[int]()
    of_group: dict[int, list[int]] = {}
    names = table[GROUP_ID].to_pylist() if GROUP_ID in table.column_names else [0] * table.num_rows
    values = table[IMAGES] if has_images else [None] * table.num_rows
    in_prompts = _in_prompts(table, observed)
    for name, value, seen in zip(names, values, in_prompts, strict=True):
        known = of_group.setdefault(name, [])
        own = None if value is None else value.values
        number = next((each for each in known if shown[each][1] == seen and _same(shown[each][0], own)), len(groups))
        if number == len(groups):
            groups.append(() if value is None else images_of(value.as_py()))
            shown.append((own, seen))
            known.append(number)
        of_row.append(number)
    return RowImages(groups, torch.tensor(of_row, dtype=torch.int64), observed)


def _observed(table: pa.Table) -> list[tuple[ObservedImage, ...]]:
    """Return the images that environments have shown in each row; none at all for a table without the column."""
    if OBSERVED_IMAGES not in table.column_names or table.schema.field(OBSERVED_IMAGES).type != TYPES[OBSERVED_IMAGES]:
        return []
    return [
        tuple(ObservedImage(one["start"], Image(one["bytes"])) for one in row)
        for row in table[OBSERVED_IMAGES].to_pylist()
    ]


def _in_prompts(table: pa.Table, observed: list[tuple[ObservedImage, ...]]) -> list[tuple[ObservedImage, ...]]:
    if not observed:
        return [()] * table.num_rows
    lengths = table[PROMPT_IDS].combine_chunks().value_lengths().to_pylist()
    return [tuple(one for one in row if one.start < length) for row, length in zip(observed, lengths, strict=True)]


def _same(one: pa.Array | None, other: pa.Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(one.equals(other))
