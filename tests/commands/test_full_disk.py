"""A command that fills a disk says so and how much is missing, and leaves nothing that looks
whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile

import pytest
from siirl_storage import TableNotFound, open_table

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.export import put_folder
from siirl_dask.runs.folder import write_identity
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.training import build_trainer
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from tests.conftest import digits_overrides
from tests.disks import small_disk

SIZE = 64 * 1024
FULL = "the disk is full: [0-9,]+ of its 65,536 bytes are free"
MISSING = f"{FULL}, and [0-9,]+ were to be written next, at least [0-9,]+ more than there are"


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    with small_disk(place, SIZE) as mounted:
        yield mounted


def refused(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, arguments)])
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def run(digits_task, tmp_path):
    """A run with a checkpoint of one step."""
    url = tmp_path / "run"
    more = [f"model.path={tiny_model(tmp_path / 'base')}"]
    file = load_config_file(
        shipped("quickstart.yaml"), [*digits_overrides(digits_task, url), *more]
    )
    config = file.config
    write_identity(config, dags(file)[0], replace=False)
    trainer = build_trainer(
        Device("w"), Rank(), model=config.model, trainer=config.trainer, rollout=config.rollout
    )
    with take(str(url), 30.0, print) as attempt:
        checkpoints = Checkpoints(attempt=attempt, keep=9)
        folder = checkpoints.folder(1)
        save = DistributedCheckpoint(asynchronous=False).save
        written = save(f"{folder}/policy", trainer.state(), None).result()
        files = {f"policy/{name}": digest for name, digest in written.items()}
        checkpoints.commit(folder, CheckpointState(step=1, roles=["policy"]), files)
    return url


def test_an_export_says_how_much_is_missing_at_its_destination_and_leaves_nothing_there(
    run, disk, capsys
):
    said = refused(capsys, "export", run, disk / "model")
    assert re.search(f"{disk}/model.*{MISSING}", said)
    assert list(disk.iterdir()) == []


def test_an_export_says_that_the_disk_of_temporary_files_is_full(
    run, disk, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    said = refused(capsys, "export", run, tmp_path / "model")
    assert re.search(f"TMPDIR.*{MISSING}", said)
    assert not (tmp_path / "model").exists()
    assert list(disk.iterdir()) == []


def test_what_is_missing_for_a_model_counts_all_files_that_are_left(disk, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a", "b", "config.json"):
        (folder / name).write_bytes(bytes(40_000))
    with pytest.raises(ConfigError, match="and 80,000 were to be written next") as raised:
        put_folder(folder, str(disk / "out"))
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("append", [False, True])
def test_an_import_says_how_much_is_missing_and_leaves_the_table_as_it_was(
    append, disk, tmp_path, capsys
):
    small = tmp_path / "small.jsonl"
    large = tmp_path / "large.jsonl"
    small.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    noise = [os.urandom(1000).hex() for _ in range(100)]
    large.write_text("".join(json.dumps({"prompt": text, "answer": "b"}) + "\n" for text in noise))
    if append:
        main(["data", "import", str(small), str(disk / "table")])
    before = sorted(disk.rglob("*.*"))
    said = refused(
        capsys, "data", "import", large, disk / "table", *(["--append"] if append else [])
    )
    assert re.search(MISSING, said)
    assert sorted(disk.rglob("*.*")) == before
    if append:
        assert open_table(str(disk / "table")).num_rows == 1


def test_an_import_whose_last_record_does_not_fit_leaves_no_rows_that_look_like_a_dataset(
    disk, tmp_path, capsys
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    main(["data", "import", str(rows), str(disk / "measured")])
    part = next((disk / "measured").rglob("*.parquet")).stat().st_size
    blocks = -(-part // 4096)
    for file in sorted(disk.rglob("*.*")):
        file.unlink()
    (disk / "others").write_bytes(bytes(SIZE - 4096 * blocks))
    said = refused(capsys, "data", "import", rows, disk / "table")
    assert re.search(FULL, said)
    assert [file.name for file in (disk / "table").rglob("*.*")] == []
    with pytest.raises(TableNotFound):
        open_table(str(disk / "table"))


def test_a_report_says_how_much_is_missing_and_leaves_the_one_that_was_there(run, disk, capsys):
    (disk / "report.html").write_text("of yesterday")
    (disk / "others").write_bytes(bytes(SIZE - 8192))
    assert re.search(MISSING, refused(capsys, "report", run, "-o", disk / "report.html"))
    assert (disk / "report.html").read_text() == "of yesterday"
    assert sorted(file.name for file in disk.iterdir()) == ["others", "report.html"]
