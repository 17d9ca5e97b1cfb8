"""The task of counting cells: its pictures, its questions, and a warm start on them."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image as pil
from transformers import AutoTokenizer

from siirl_dask.config import ImagesConfig
from siirl_dask.errors import PlanError, RunError
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.planner.spec.dag_spec import bind
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.tasks import cells
from siirl_dask.tasks.cells import COLOURS, counted_cells, draw_grid, encoded, question
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.tasks.warm_start import NO_LOSS

GRIDS = [draw_grid(np.random.default_rng(seed)) for seed in range(60)]


def test_a_picture_shows_as_many_cells_of_the_colour_as_the_answer_says():
    for grid in GRIDS:
        pixels = np.asarray(pil.open(io.BytesIO(grid.picture))).astype(int)
        middles = pixels[4::8, 4::8].reshape(-1, 3)
        near = np.abs(middles - np.array(COLOURS[grid.colour])).max(axis=1) <= 20
        assert near.sum() == grid.count
        assert 4 <= len(middles) <= 16
    assert len({grid.colour for grid in GRIDS}) == 3
    assert {0, 1, 2, 3} <= {grid.count for grid in GRIDS}


def test_the_family_of_the_task_can_be_given_in_a_config():
    assert bind(cells.prepare, {"family": "qwen3_vl"}, "data.prepare_options").keywords == {
        "family": "qwen3_vl"
    }
    with pytest.raises(PlanError, match="qwen3_vl"):
        bind(cells.prepare, {"family": "gpt"}, "data.prepare_options")


def test_black_pictures_have_the_sizes_of_those_they_stand_for(tmp_path, small):
    task = cells.write_cells_task(tmp_path, accuracy=0.0)
    black = pq.read_table(cells.write_blanked(task.train, tmp_path / "black.parquet"))
    shown = pq.read_table(task.train)
    assert black.drop(["images"]).equals(shown.drop(["images"]))
    for pair in zip(black["images"].to_pylist(), shown["images"].to_pylist(), strict=True):
        one, other = (pil.open(io.BytesIO(images[0]["bytes"])) for images in pair)
        assert one.size == other.size
        assert not np.asarray(one).any()


def test_only_the_number_is_rewarded():
    assert counted_cells("", " 3", "3") == 1.0
    assert [counted_cells("", text, "3") for text in ("4", "33", "3 cells", "")] == [0.0] * 4


def test_a_demonstration_has_the_tokens_of_a_prompt_that_is_sampled_from(tmp_path):
    folder = tiny_vlm(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = ImageProcessor.load(str(folder), ImagesConfig(column="images"))
    shown, labels = encoded(tokenizer, processor, GRIDS[:3])
    learned = [[token for token in row if token != NO_LOSS] for row in labels.tolist()]
    end = tokenizer.eos_token_id
    assert learned == [
        [*HuggingFaceTokenizer(tokenizer, "m").encode(f" {grid.count}"), end] for grid in GRIDS[:3]
    ]
    pads = int((shown["input_ids"] == processor.image_token).sum())
    assert pads == int(shown["mm_token_type_ids"].sum()) == len(shown["pixel_values"]) // 4
    assert question(GRIDS[0])[0]["content"] == f"<image>{GRIDS[0].colour}?"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cells, "_SIZES", {"train": 64, "validation": 8, "test": 8})
    monkeypatch.setattr(cells, "_HELD_OUT", 8)
    monkeypatch.setattr(cells, "_MAX_STEPS", 10)


@pytest.mark.usefixtures("small")
def test_the_task_is_written_as_datasets_writes_images_in_row_groups_of_few_rows(tmp_path):
    seen = []
    task = cells.write_cells_task(tmp_path, accuracy=0.0, progress=lambda *at: seen.append(at))
    assert [(most, reached) for _, most, reached in seen] == [(10, pytest.approx(0, abs=1))]
    file = pq.ParquetFile(task.train)
    assert file.metadata.num_row_groups == 32
    assert b'"_type": "Image"' in file.schema_arrow.metadata[b"huggingface"]
    (row,) = file.read().slice(0, 1).to_pylist()
    assert set(row) == {"prompt", "images", "answer"}
    assert row["images"][0]["bytes"].startswith(b"\x89PNG")
    again = cells.write_cells_task(tmp_path / "again", accuracy=0.0)
    assert pq.read_table(again.train).equals(file.read()), "the seed alone decides"


@pytest.mark.usefixtures("small")
def test_a_warm_start_that_misses_its_accuracy_is_an_error(tmp_path):
    with pytest.raises(
        RunError, match=r"after 10 steps the model counts .* of unseen pictures, expected 101%"
    ):
        cells.write_cells_task(tmp_path, accuracy=1.01, family="qwen3_vl")
    assert not (tmp_path / "model").exists()
