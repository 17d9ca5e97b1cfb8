"""The plot is an SVG of everything that a run has logged so far."""

from __future__ import annotations

import re
from uuid import uuid4
from xml.etree import ElementTree

import fsspec
import pytest

from siirl_dask.errors import DataError
from siirl_dask.observe import MetricsLog, Record
from siirl_dask.views.charts.run_plot import draw, plot_run

SVG = "{http://www.w3.org/2000/svg}"


def records() -> list[Record]:
    found = [
        Record(
            step=0, phase="validation", seconds=0.1, metrics={"reward/mean": 0.5, "samples": 256.0}
        )
    ]
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


def parsed(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root):
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("base", ["{tmp}", "memory://{id}"])
def test_a_run_becomes_an_svg_on_any_filesystem(tmp_path, base):
    url = base.format(tmp=tmp_path, id=uuid4().hex) + "/runs/quickstart"
    log = MetricsLog(url)
    for record in records():
        log.write(record)
    plot_run(url, f"{url}/plots/run.svg")
    root = parsed(fsspec.open(f"{url}/plots/run.svg").open().read())
    assert texts(root)[:2] == ["quickstart", "reward"]
    assert [line.get("class") for line in root.iter(f"{SVG}polyline")] == ["r0", "r0", "r1", "r0"]


def test_every_curve_is_named_with_its_first_and_its_newest_value():
    told = "\n".join(texts(parsed(draw(records(), "a run"))))
    assert "mean 0.517 to 0.833" in told
    assert "1 standard deviation" in told
    assert "validation 0.5 to 0.8" in told
    assert "test 0.79" in told


def test_a_band_of_shares_ends_at_one_and_the_steps_of_all_panels_are_the_same():
    root = parsed(draw(records(), "a run"))
    (band,) = root.iter(f"{SVG}polygon")
    heights = {point.split(",")[1] for point in band.get("points").split()}
    assert len(heights) > 10, "the lower side rises with the mean, and the upper one stays at 1"
    assert len(heights) < 40
    groups = root.findall(f"{SVG}g")
    steps = [
        [text for text in texts(group) if re.fullmatch(r"\d+", text) and int(text) >= 5]
        for group in groups
    ]
    assert steps == [["5", "10", "15", "20"]] * 3


def test_a_name_in_the_title_is_no_markup(tmp_path):
    MetricsLog(str(tmp_path)).write(records()[0])
    plot_run(str(tmp_path), f"{tmp_path}/run.svg", "a<script>&\x1b")
    assert (
        texts(parsed((tmp_path / "run.svg").read_bytes()))[0]
        == "a<script>&\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        (Record(step=1, phase="train", seconds=0.1, metrics={}), 3),
        (
            Record(
                step=1,
                phase="train",
                seconds=0.1,
                metrics={"reward/mean": None, "policy/entropy": None},
            ),
            3,
        ),
        (Record(step=1, phase="train", seconds=0.1, metrics={"reward/mean": 0.5}), 2),
        (Record(step=1, phase="test", seconds=0.1, metrics={"reward/mean": 0.5}), 2),
    ],
)
def test_metrics_that_were_not_logged_are_said_and_are_no_error(tmp_path, record, missing):
    MetricsLog(str(tmp_path)).write(record)
    plot_run(str(tmp_path), f"{tmp_path}/run.svg", "a title")
    assert texts(parsed((tmp_path / "run.svg").read_bytes())).count("not logged") == missing


def test_a_run_that_has_no_metrics_file_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        plot_run(str(tmp_path), f"{tmp_path}/run.svg")
