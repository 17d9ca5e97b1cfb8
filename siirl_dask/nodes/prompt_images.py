"""Encodes prompts that show images: the images are read and checked, and each one's placeholder is
repeated for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from siirl_dask.config import ImagesConfig
from siirl_dask.context import Context, Reduce
from siirl_dask.errors import ConfigError, ImageError, Origin
from siirl_dask.images import Image, images_of, normalised
from siirl_dask.images.prompts import marked
from siirl_dask.nodes.failures import row_location
from siirl_dask.rollout import RolloutEngine, processor_of
from siirl_dask.schema import IMAGES, PROMPT, ROW_ID

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor


def image_column(images: ImagesConfig, column: str) -> str:
    """Return the column that has the images: of the dataset, or, for a prompt that an agent wrote,
    the column that the first agent's ``encode_prompts`` has written.
    """
    assert images.column is not None
    return images.column if column == PROMPT else IMAGES


def encode_with_images(
    ctx: Context,
    table: pa.Table,
    column: str,
    images: ImagesConfig,
    encode: Callable[[int, Any], list[int]],
) -> tuple[pa.Table, list[list[int]], list[list[int]]]:
    """Return the table with its images in the column ``images``, each prompt's ids with one
    placeholder an image, and its ids with as many placeholders as each image has tokens. Image
    sizes are read from the images' headers alone. ``encode(row, prompt)`` returns the ids of a row's
    prompt.
    """
    engine: RolloutEngine = ctx.resource
    processor = _processor(engine, images)
    name = image_column(images, column)
    image_values = normalised(table[name], name)
    table = table.drop_columns([name]).append_column(IMAGES, image_values)
    values = image_values.to_pylist()
    processor.bring(image for value in values for image in _images_at_urls(value))
    collapsed_ids: list[list[int]] = []
    expanded_ids: list[list[int]] = []
    image_count = 0
    for row, (prompt, value) in enumerate(zip(table[column].to_pylist(), values, strict=True)):
        with _naming_row(ctx, table, row):
            row_images = images_of(value)
            text = None if prompt is None else marked(prompt, processor.family.placeholder)
            ids = encode(row, text)
            collapsed_ids.append(ids)
            expanded_ids.append(processor.expand(ids, row_images))
        image_count += len(row_images)
    collapsed_tokens = sum(len(ids) for ids in collapsed_ids)
    expanded_tokens = sum(len(ids) for ids in expanded_ids)
    image_tokens = expanded_tokens - collapsed_tokens + image_count  # one an image was there before
    ctx.log("data/images", image_count, Reduce.SUM)
    ctx.log("data/image_tokens", image_tokens, Reduce.SUM)
    return table, collapsed_ids, expanded_ids


def _images_at_urls(value: Sequence[dict[str, object] | None] | None) -> Iterator[Image]:
    """Yield the images of a row that are at a URL. A null entry is skipped: ``images_of`` raises
    for it later, with its row.
    """
    for entry in value or ():
        if entry is not None and entry["bytes"] is None and entry["path"] is not None:
            yield Image(None, str(entry["path"]))


def _processor(engine: RolloutEngine, images: ImagesConfig) -> ImageProcessor:
    """Return the processor that the engine generates with. ConfigError for an engine without
    one.
    """
    processor = processor_of(engine)
    if processor is None:
        raise ConfigError(
            f"images.column={images.column!r}, and the engine takes texts alone: give its role's "
            "builder the images as well, as in with: {images: ${images}, ...}"
        )
    return processor


def check_images(ctx: Context, table: pa.Table, images: ImagesConfig) -> None:
    """Decode every image once: one that is cut off behind its header would fail only after
    others were generated.
    """
    processor = _processor(ctx.resource, images)
    for row, value in enumerate(table[IMAGES].to_pylist()):
        with _naming_row(ctx, table, row):
            processor.check(images_of(value))
        ctx.device.progress()


@contextmanager
def _naming_row(ctx: Context, table: pa.Table, row: int) -> Iterator[None]:
    """Add the row to an ImageError that is raised inside."""
    try:
        yield
    except ImageError as error:
        named = ImageError(f"{row_location(ctx, table, row)}: {error}")
        named.origin = Origin(rows=(table[ROW_ID][row].as_py(),))
        raise named from error.__cause__
