"""Rows that show images, and their scores by a plain forward pass of each row by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from siirl_dask.config import ImagesConfig
from siirl_dask.images import Image, load_processor
from siirl_dask.images.noise import noise
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.models.loading import load_pretrained, model_class
from siirl_dask.testing.rows import split_rows
from siirl_dask.training import PackedRows, RowImages
from siirl_dask.training.model.vision import plain_arguments

READ = ImagesConfig(column="images")
"""Settings with which images are read."""
Row = tuple[Sequence[int], Sequence[int], tuple[Image, ...]]
"""Prompt, response and images of a row."""
_TEXT = 200  # tokens of text: special ones come after


def processor_of(folder: Path) -> ImageProcessor:
    """Return the processor of the model in ``folder``."""
    processor = load_processor(str(folder), READ)
    assert processor is not None
    return processor


def image_rows(folder: Path, *, sampled: bool = False) -> list[Row]:
    """Return nine rows: three that share a prompt with an image, two in the same words about an
    image of the same size, two of two images, and two of text alone. With ``sampled`` some
    responses have placeholders.
    """
    processor = processor_of(folder)
    numbers = torch.Generator().manual_seed(0)
    small, same, wide, high = (
        noise(width, height, seed)
        for seed, (width, height) in enumerate(((24, 16), (24, 16), (40, 16), (16, 32)))
    )

    def text(length: int) -> list[int]:
        return torch.randint(0, _TEXT, (length,), generator=numbers).tolist()

    def placed(*images: Image) -> list[int]:
        return [
            token
            for image in images
            for token in (*text(1), *[processor.image_token] * processor.tokens(image))
        ]

    question = [*placed(small), *text(3)]
    pair = [*placed(wide, high), *text(2)]
    alone = text(7)
    rows: list[Row] = [(question, text(length), (small,)) for length in (4, 0, 6)]
    rows += [(question, text(length), (same,)) for length in (5, 5)]
    rows += [
        (alone, text(3), ()),
        (pair, text(2), (wide, high)),
        (alone, text(8), ()),
        (pair, text(9), (wide, high)),
    ]
    if not sampled:
        return rows
    return [
        (prompt, [*response, processor.image_token, *response[:1]], images)
        for prompt, response, images in rows
    ]


def pack(rows: Sequence[Row]) -> PackedRows:
    """Pack rows; those with the same images are of one group."""
    tokens = [token for prompt, response, _ in rows for token in (*prompt, *response)]
    groups = list(dict.fromkeys(images for *_, images in rows))
    return PackedRows(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor([0, *(len(prompt) + len(response) for prompt, response, _ in rows)]).cumsum(0),
        torch.tensor([len(prompt) for prompt, *_ in rows], dtype=torch.int64),
        RowImages(
            groups, torch.tensor([groups.index(images) for *_, images in rows], dtype=torch.int64)
        ),
    )


class PlainModel:
    """The model of a folder as transformers runs it, on one row at a time, with gradient."""

    def __init__(self, folder: Path) -> None:
        self.model = load_pretrained(
            model_class(str(folder), "model"), str(folder), torch.float32, "model"
        ).eval()
        self._processor = processor_of(folder)

    def logprobs(self, rows: PackedRows, temperature: float) -> Tensor:
        """Return the log-prob of each response token. [K]."""
        assert rows.images is not None
        found = []
        shown = [rows.images.groups[group] for group in rows.images.of_row.tolist()]
        for (row, prompt), images in zip(split_rows(rows), shown, strict=True):
            pixels = [self._processor.pixels(image) for image in images]
            seen = plain_arguments(row[None], pixels, self._processor.image_token)
            logits = self.model(input_ids=row[None], use_cache=False, **seen).logits[
                0, prompt - 1 : -1
            ]
            scores = (logits / temperature).log_softmax(-1)
            found.append(scores.gather(1, row[prompt:, None]).squeeze(1))
        return torch.cat(found)
