"""Builds a task with images on the spot, without a download: how many cells of a grid are of a
colour?

A picture has 2 to 4 rows of 2 to 4 cells, black, red, green or blue with noise, and the prompt asks
for one colour: ``<image>red?`` -> ``3``. A warm start on demonstrations brings a tiny model that
sees images to count about half of unseen pictures; RL takes it from there. Whoever does not look
can only guess the likeliest number.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image as pil

from siirl_dask.config import Config, ImagesConfig
from siirl_dask.images import Image
from siirl_dask.images.families import VlmFamily
from siirl_dask.tasks.preparing import Progress, prepare_task, written_whole
from siirl_dask.tasks.sorting import Task, task_in

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from siirl_dask.images.processor import ImageProcessor

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
_BLACK = (20, 20, 20)
_CELL = 8  # pixels: what a tiny model sees as one token
_NOISE = 20
_MOST = 9  # cells of a colour: the answer is one digit
_SIZES = {"train": 4096, "validation": 256, "test": 512}
_HELD_OUT = 256
_ACCURACY = 0.5
_BATCH = 64
_MAX_STEPS = 400
_ROW_GROUPS = 32  # in each file; a row group of images is read whole
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
_IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
_FEATURES = {"info": {"features": {"images": {"feature": {"_type": "Image"}, "_type": "List"}}}}


@dataclass(frozen=True, slots=True)
class CellPicture:
    """A picture, and the question about it."""

    picture: bytes
    """A PNG."""
    colour: str
    count: int


def counted_cells(prompt: object, response: str, answer: object, **extra: object) -> float:
    """Return 1.0 for the number and nothing else."""
    return float(response.strip() == str(answer).strip())


def write_cells_task(
    folder: str | Path,
    *,
    seed: int = 0,
    family: VlmFamily = "qwen2_5_vl",
    accuracy: float = _ACCURACY,
    progress: Progress | None = None,
) -> Task:
    """Write the data, and a model of ``family`` that counts ``accuracy`` of unseen pictures right,
    greedily.

    The training data is written last: its presence means complete. RunError if the model never gets
    there.
    """
    from siirl_dask.tasks.tiny_vlm import tiny_vlm

    task = task_in(folder)
    random = np.random.default_rng(seed)
    tables = {name: [draw_grid(random) for _ in range(size)] for name, size in _SIZES.items()}
    with written_whole(task.model) as unfinished:
        tiny_vlm(unfinished, seed=seed, family=family)
        _warm_start(unfinished, random, accuracy, progress)
    for name in reversed(_SIZES):
        _write(getattr(task, name), tables[name])
    return task


def prepare(config: Config, *, family: VlmFamily = "qwen2_5_vl") -> None:
    """Write the task into the folder of ``data.url``, seeded with ``run.seed``: ``data.prepare``
    of the quickstart.
    """
    prepare_task(config, partial(write_cells_task, family=family), "counts {:.0%}")


def draw_grid(random: np.random.Generator) -> CellPicture:
    """Return a picture of random cells, with a random colour to count."""
    names = ["black", *COLOURS]
    colour = names[random.integers(1, len(names))]
    while True:
        cells = random.integers(0, len(names), random.integers(2, 5, 2))
        count = int((cells == names.index(colour)).sum())
        if count <= _MOST:
            break
    shades = np.array([_BLACK, *COLOURS.values()])[cells].repeat(_CELL, 0).repeat(_CELL, 1)
    noise = random.integers(-_NOISE, _NOISE + 1, shades.shape)
    return CellPicture(
        _png(pil.fromarray((shades + noise).clip(0, 255).astype(np.uint8))), colour, count
    )


def write_blanked(data: Path, path: Path) -> Path:
    """Write the data in ``data`` to ``path`` with black pictures of the same sizes: for whoever
    wants to know whether a policy looks. Returns ``path``.
    """
    rows = pq.read_table(data)
    black = []
    for shown in rows["images"].to_pylist():
        size = pil.open(io.BytesIO(shown[0]["bytes"])).size
        black.append([{"bytes": _png(pil.new("RGB", size)), "path": None}])
    images = pa.array(black, rows.schema.field("images").type)
    blanked = rows.set_column(
        rows.column_names.index("images"), rows.schema.field("images"), images
    )
    pq.write_table(blanked, path, row_group_size=max(1, len(rows) // _ROW_GROUPS))
    return path


def question(grid: CellPicture) -> list[dict[str, str]]:
    """Return the chat that asks for the number of cells."""
    return [{"role": "user", "content": f"<image>{grid.colour}?"}]


def _png(picture: pil.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _write(path: Path, grids: Sequence[CellPicture]) -> None:
    table = pa.table(
        {
            "prompt": pa.array([question(grid) for grid in grids], _MESSAGES),
            "images": pa.array(
                [[{"bytes": grid.picture, "path": None}] for grid in grids], _IMAGES
            ),
            "answer": pa.array([str(grid.count) for grid in grids], pa.string()),
        }
    )
    table = table.replace_schema_metadata({"huggingface": json.dumps(_FEATURES)})
    pq.write_table(table, path, row_group_size=max(1, len(grids) // _ROW_GROUPS))


def _warm_start(
    folder: Path,
    random: np.random.Generator,
    accuracy: float,
    progress: Progress | None,
) -> None:
    """Train the model in ``folder`` until it counts ``accuracy`` of unseen pictures."""
    from siirl_dask.images.processor import ImageProcessor
    from siirl_dask.tasks.warm_start import right_share, train_until

    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    held_out = [draw_grid(random) for _ in range(_HELD_OUT)]

    def batch(tokenizer: Any, step: int) -> tuple[dict[str, Tensor], Tensor]:
        return encoded(tokenizer, processor, [draw_grid(random) for _ in range(_BATCH)])

    def measure(model: PreTrainedModel, tokenizer: Any) -> float:
        return right_share(model, encoded(tokenizer, processor, held_out))

    train_until(
        folder,
        batch,
        measure,
        wanted=accuracy,
        most_steps=_MAX_STEPS,
        said="the model counts {:.0%} of unseen pictures",
        progress=progress,
        every=lambda reached: 10 if reached < accuracy - 0.1 else 5,
    )


def encoded(
    tokenizer: Any, processor: ImageProcessor, grids: Sequence[CellPicture]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's arguments and the labels, [B, T], of pictures with their answers, which
    alone are learned.
    """
    import torch

    from siirl_dask.images.prompts import marked
    from siirl_dask.tasks.warm_start import NO_LOSS, padded

    images = [Image(grid.picture) for grid in grids]
    rows = []
    for grid, image in zip(grids, images, strict=True):
        chat = marked(question(grid), processor.family.placeholder)
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompt = processor.expand(ids, [image])
        answer = [*tokenizer(f" {grid.count}")["input_ids"], tokenizer.eos_token_id]
        rows.append((prompt + answer, [NO_LOSS] * len(prompt) + answer))
    inputs, labels = padded(rows, tokenizer.pad_token_id)
    pixels = [processor.pixels(image) for image in images]
    shown = {
        "input_ids": inputs,
        "mm_token_type_ids": (inputs == processor.image_token).long(),
        "pixel_values": torch.cat([each.values for each in pixels]),
        "image_grid_thw": torch.tensor([each.grid for each in pixels]),
    }
    return shown, labels
