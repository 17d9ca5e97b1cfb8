"""The images of prompts are seen where samples are: on pages as thumbnails, in a terminal in
words.
"""

import io
import re
from base64 import b64decode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as pil

from siirl_dask.cli import main
from siirl_dask.images.thumbnail import thumbnail
from siirl_dask.runs.samples.prompt_images import PICTURES, StoredPromptImages
from tests.images.pictures import encoded, noise, png
from tests.written_runs import begin_run, save_rows, train_record, write_metrics

ROWS = [(f"Count: {at}", str(at), f"so {at}", at / 4) for at in range(4)]
IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def dataset(folder, images, *, name="part.parquet"):
    """Write a row for each list of images, bytes or paths, in row groups of two."""
    entries = [
        [
            {
                "bytes": one if isinstance(one, bytes) else None,
                "path": None if isinstance(one, bytes) else one,
            }
            for one in own
        ]
        for own in images
    ]
    texts = [f"Count: {at}" for at in range(len(images))]
    table = pa.table({"prompt": texts, "answer": texts, "images": pa.array(entries, IMAGES)})
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / name, row_group_size=2)
    return folder


def written(tmp_path, images, *overrides, table="rollouts", steps=(3,)):
    """A run of four samples, two of each of the dataset's first two rows."""
    data = dataset(tmp_path / "data", images)
    given = ["images.column=images", "data.prompt=prompt", "data.answer=answer", *overrides]
    url = begin_run(tmp_path / "run", f"data.url={data}", f"validation.url={data}", *given)
    for step in steps:
        save_rows(
            url,
            table,
            step,
            [(p, a, f"{r} in {step}", min(1.0, w + step / 8)) for p, a, r, w in ROWS],
        )
    return url


def shown(page):
    return [
        pil.open(io.BytesIO(b64decode(one)))
        for one in re.findall(r'src="data:image/\w+;base64,([^"]*)"', page)
    ]


def rollouts_page(tmp_path, url, *asked):
    main(["rollouts", url, *asked, "--html", str(tmp_path / "page.html")])
    return (tmp_path / "page.html").read_text()


def report_page(tmp_path, url):
    write_metrics(url, [train_record(3)])
    main(["report", url, "-o", str(tmp_path / "report.html")])
    return (tmp_path / "report.html").read_text()


def test_a_page_shows_each_samples_own_images(tmp_path):
    url = written(tmp_path, [[png(seed=1)], [png(seed=2), png(9, 5, seed=3)]])
    first, *others = [
        np.asarray(one)
        for one in shown(rollouts_page(tmp_path, url, "--worst", "1", "--best", "1"))
    ][::-1]
    assert (first == np.asarray(noise(16, 24, 1))).all(), "worst is of the first row"
    assert [one.shape for one in others[::-1]] == [(24, 16, 3), (5, 9, 3)]
    assert (others[-1] == np.asarray(noise(16, 24, 2))).all()


def test_a_report_shows_the_images_of_its_samples(tmp_path):
    page = report_page(tmp_path, written(tmp_path, [[png(seed=1)], [png(seed=2)]]))
    assert len(shown(page)) == 4
    assert "img-src data:" in page


def test_prompts_of_two_validations_are_shown_with_their_images(tmp_path):
    url = written(tmp_path, [[png(seed=1)], [png(seed=2)]], table="validation", steps=(0, 3))
    diff = rollouts_page(tmp_path, url, "--table", "validation", "--diff", "0", "3")
    for page in (report_page(tmp_path, url), diff):
        seen = {np.asarray(one).tobytes() for one in shown(page)}
        assert seen == {np.asarray(noise(16, 24, seed)).tobytes() for seed in (1, 2)}


def test_a_terminal_names_formats_and_sizes(tmp_path, capsys):
    url = written(tmp_path, [[], [png(), encoded(noise(8, 4), "JPEG")]])
    main(["rollouts", url, "--best", "1"])
    assert "[2 images: 16x24 PNG, 8x4 JPEG]" in capsys.readouterr().out


def test_a_prompt_without_images_shows_nothing(tmp_path, capsys):
    url = written(tmp_path, [[], []])
    assert "images</h4>" not in rollouts_page(tmp_path, url, "--best", "4")
    capsys.readouterr()
    main(["rollouts", url, "--best", "1"])
    assert "image" not in capsys.readouterr().out


def test_a_dataset_that_is_gone_is_told_in_a_line(tmp_path, capsys):
    url = written(tmp_path, [[png()], [png()]])
    (tmp_path / "data" / "part.parquet").unlink()
    page = rollouts_page(tmp_path, url, "--worst", "1")
    assert 'class="note">its images cannot be shown: dataset ' in page
    assert "so 0" in page
    main(["rollouts", url, "--worst", "1"])
    assert "[its images cannot be shown: dataset " in " ".join(capsys.readouterr().out.split())
    assert not shown(report_page(tmp_path, url))


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (png()[:60], "image 1 cannot be shown: it is damaged or cut off"),
        (
            "/nowhere/<script>a.png",
            "image 1 cannot be shown: &#x27;/nowhere/&lt;script&gt;a.png&#x27; cannot be read",
        ),
        ("a.png", "set images.folder"),
        (png(400, 400), "images.max_source_pixels"),
    ],
)
def test_an_image_that_cannot_be_read_is_told_and_the_others_are_shown(tmp_path, image, said):
    url = written(tmp_path, [[image, png()], []], "images.max_source_pixels=10000")
    page = rollouts_page(tmp_path, url, "--worst", "1")
    assert said in page
    assert "<script" not in page
    assert len(shown(page)) == 1


def test_relative_paths_begin_in_the_folder_of_images(tmp_path):
    (tmp_path / "a.png").write_bytes(png(seed=7))
    page = rollouts_page(
        tmp_path, written(tmp_path, [["a.png"], []], f"images.folder={tmp_path}"), "--worst", "1"
    )
    assert (np.asarray(shown(page)[0]) == np.asarray(noise(16, 24, 7))).all()


def test_a_row_is_found_in_its_part_and_source(tmp_path):
    for name in ("one", "two"):
        for number in range(2):
            pictures = [[png(seed=10 * number + row + 100 * (name == "two"))] for row in range(3)]
            dataset(tmp_path / name, pictures, name=f"{number}.parquet")
    sources = ", ".join(f"{name}: {{url: {tmp_path / name}, weight: 1}}" for name in ("one", "two"))
    given = [
        "images.column=images",
        "data.prompt=prompt",
        "data.answer=answer",
        "data.url=null",
        f"data.sources={{{sources}}}",
    ]
    url = begin_run(tmp_path / "run", *given)
    places = {
        "source_name": ["two", "one", "one", None],
        "data_part": [1, 0, 7, 0],
        "data_row": [2, 1, 0, 0],
    }
    told = StoredPromptImages(url, thumbnails=True).added_to(pa.table(places))[PICTURES].to_pylist()
    assert [own[0]["url"] for own in told[:2]] == [
        thumbnail(png(seed=seed), 10**6) for seed in (112, 1)
    ]
    assert "has no row 0 in part 7" in told[2][0]["problem"]
    assert told[3] == []


def test_a_page_stays_small(tmp_path):
    large = thumbnail(encoded(noise(1500, 700), "PNG"), 10**7)
    assert len(large) < 28_000
    assert max(pil.open(io.BytesIO(b64decode(large.partition(",")[2]))).size) <= 256
    url = written(tmp_path, [[png()] * 8, []])
    samples = pa.table({"data_part": [0] * 30, "data_row": [0] * 30})
    told = StoredPromptImages(url, thumbnails=True).added_to(samples)[PICTURES].to_pylist()
    assert sum(one["url"] is not None for own in told for one in own) < 110
    assert told[-1][0]["problem"] == "its images are left out: 100 are shown"


def test_files_that_are_slow_to_come_are_left_out_once_their_time_is_over(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    place = str(tmp_path / "a.png")
    url = written(tmp_path, [[place, place, png()], []], "images.timeout=1e-9")
    page = rollouts_page(tmp_path, url, "--worst", "1")
    assert (
        "image 2 cannot be shown: it was not fetched: others took images.timeout=1e-09 seconds"
        in page
    )
    assert shown(page)
