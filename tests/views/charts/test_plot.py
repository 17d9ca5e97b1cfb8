"""The plot is a PNG of everything that a run has logged so far."""

from __future__ import annotations

from uuid import uuid4

import fsspec
import pytest

from siirl_dask.errors import DataError
from siirl_dask.observe import MetricsLog, Record
from siirl_dask.views.charts.plot import plot_run


def records() -> list[Record]:
    found = [Record(step=0, phase="validation", seconds=0.1, metrics={"reward/mean": 0.5, "samples": 256.0})]
    for step in range(1, 21):
        metrics: dict[str, float | None] = {
            "reward/mean": 0.5 + step / 60,
            "reward/std": 0.3,
            "policy/entropy": 1.0 / step,
        }
        found.append(Record(step=step, phase="train", seconds=0.1, metrics=metrics))
    found.append(Record(step=20, phase="validation", seconds=0.1, metrics={"reward/mean": 0.8}))
    found.append(Record(step=20, phase="test", seconds=0.1, metrics={"reward/mean": 0.79}))
    return found


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


@pytest.mark.parametrize("base", ["{tmp}", "memory://{id}"])
def test_a_run_becomes_a_png_on_any_filesystem(tmp_path, base):
    url = base.format(tmp=tmp_path, id=uuid4().hex) + "/runs/quickstart"
    log = MetricsLog(url)
    for record in records():
        log.write(record)
    plot_run(url, f"{url}/plots/run.png")
    assert size_of(fsspec.open(f"{url}/plots/run.png").open().read()) == (1800, 555)


def test_a_name_in_the_title_is_no_formula(tmp_path):
    MetricsLog(str(tmp_path)).write(records()[0])
    plot_run(str(tmp_path), f"{tmp_path}/run.png", r"a$\frac$b")
    size_of((tmp_path / "run.png").read_bytes())


@pytest.mark.parametrize(
    "record",
    [
        Record(step=1, phase="train", seconds=0.1, metrics={}),
        Record(step=1, phase="train", seconds=0.1, metrics={"reward/mean": None, "policy/entropy": None}),
        Record(step=1, phase="train", seconds=0.1, metrics={"reward/mean": 0.5}),
        Record(step=1, phase="test", seconds=0.1, metrics={"reward/mean": 0.5}),
    ],
)
def test_metrics_that_were_not_logged_are_no_error(tmp_path, record):
    MetricsLog(str(tmp_path)).write(record)
    plot_run(str(tmp_path), f"{tmp_path}/run.png", "a title")
    size_of((tmp_path / "run.png").read_bytes())


def test_a_run_that_has_no_metrics_file_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        plot_run(str(tmp_path), f"{tmp_path}/run.png")
