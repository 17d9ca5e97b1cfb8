"""The images of a table's rows, taken once for the rows of a group that show the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import torch

from siirl_dask.images import Image, images_of
from siirl_dask.schema import GROUP_ID, IMAGES, OBSERVED_IMAGES, PROMPT_IDS, TYPES
from siirl_dask.training import ObservedImage, RowImages


@dataclass(frozen=True, slots=True)
class _ImageSet:
    """The images that one or more rows of a group show."""

    number: int
    """Index of the set among all sets of the table."""
    prompt_images: pa.Array | None
    """The value of the column ``images``; None where it is null."""
    observed: tuple[ObservedImage, ...]
    """Images of the environment within the prompt."""

    def equals(self, prompt_images: pa.Array | None, observed: tuple[ObservedImage, ...]) -> bool:
        if self.observed != observed:
            return False
        if self.prompt_images is None or prompt_images is None:
            return self.prompt_images is prompt_images
        return bool(self.prompt_images.equals(prompt_images))


@dataclass(slots=True)
class _ImageSets:
    """The different sets of images of a table's rows. Only rows of the same group are compared."""

    images: list[tuple[Image, ...]] = field(default_factory=list)
    """The images of each set, by its number."""
    of_group: dict[int, list[_ImageSet]] = field(default_factory=dict)

    def number(
        self,
        group: int,
        value: pa.Scalar | None,
        observed: tuple[ObservedImage, ...],
    ) -> int:
        """Return the number of the set that a row shows; a set that is new is added."""
        prompt_images = None if value is None else value.values
        known = self.of_group.setdefault(group, [])
        for image_set in known:
            if image_set.equals(prompt_images, observed):
                return image_set.number
        number = len(self.images)
        self.images.append(() if value is None else images_of(value.as_py()))
        known.append(_ImageSet(number, prompt_images, observed))
        return number


def row_images(table: pa.Table) -> RowImages | None:
    """Return the rows' images; None for a table without the columns, and for a dataset's own column
    of their name, which ``encode_prompts`` has not made. Rows without any show an empty tuple.

    Samples of a prompt have the same value, and where it is the same memory, comparing takes no
    time. Rows of a group may show other images than its first, as turns of an episode do.
    """
    has_images = _has_column(table, IMAGES)
    observed = _observed_images(table)
    if not has_images and not observed:
        return None
    groups = table[GROUP_ID].to_pylist() if GROUP_ID in table.column_names else [0] * table.num_rows
    values = table[IMAGES] if has_images else [None] * table.num_rows
    in_prompts = _within_prompts(table, observed)
    sets = _ImageSets()
    set_of_row = [
        sets.number(group, value, in_prompt)
        for group, value, in_prompt in zip(groups, values, in_prompts, strict=True)
    ]
    return RowImages(sets.images, torch.tensor(set_of_row, dtype=torch.int64), observed)


def _has_column(table: pa.Table, name: str) -> bool:
    """Return whether the table has a column of images; a dataset's own column of that name has
    another type.
    """
    if name not in table.column_names:
        return False
    return bool(table.schema.field(name).type == TYPES[name])


def _observed_images(table: pa.Table) -> list[tuple[ObservedImage, ...]]:
    """Return the images that environments have shown in each row; an empty list for a table
    without the column.
    """
    if not _has_column(table, OBSERVED_IMAGES):
        return []
    observed = []
    for row in table[OBSERVED_IMAGES].to_pylist():
        observed.append(tuple(ObservedImage(one["start"], Image(one["bytes"])) for one in row))
    return observed


def _within_prompts(
    table: pa.Table, observed: list[tuple[ObservedImage, ...]]
) -> list[tuple[ObservedImage, ...]]:
    """Return, for each row, the observed images that begin within its prompt."""
    if not observed:
        return [()] * table.num_rows
    lengths = table[PROMPT_IDS].combine_chunks().value_lengths().to_pylist()
    within = []
    for row, length in zip(observed, lengths, strict=True):
        within.append(tuple(image for image in row if image.start < length))
    return within
