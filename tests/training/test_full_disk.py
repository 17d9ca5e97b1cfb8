"""A disk that is full is named with what is free on it, whoever writes and wherever the disk
ends.
"""

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from siirl_storage import open_fs, stage_part, write_atomic, write_exclusive
from siirl_storage.files import full_disk_named

from siirl_dask.observe import MetricsLog, Record
from siirl_dask.planner import Phase
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from tests.disks import small_disk

SIZE = 256 * 1024
NUMBERS = torch.arange(SIZE // 4, dtype=torch.int32)  # as many bytes as the disk has


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A disk of 256 KiB."""
    place = tmp_path_factory.mktemp("disk")
    with small_disk(place, SIZE) as mounted:
        yield mounted


def bytes_with(write):
    def fill(folder):
        fs, path = open_fs(str(folder / "file"))
        write(fs, path, NUMBERS.numpy().tobytes())

    return fill


def rows(folder):
    stage_part(
        str(folder / "rollouts"),
        1,
        0,
        pa.table({"x": [os.urandom(1024) for _ in range(SIZE // 1024)]}),
    )


def checkpoint(asynchronous):
    def save(folder):
        state = {
            "model": {f"layer.{at}": part.clone() for at, part in enumerate(NUMBERS.split(4096))}
        }
        DistributedCheckpoint(asynchronous).save(str(folder / "checkpoint"), state, None).result(60)

    return save


def metrics(folder):
    log = MetricsLog(str(folder), None, 1)
    while True:
        log.write(Record(step=1, phase=Phase.TRAIN, seconds=1.0, metrics={"a" * 4000: 1.0}))


WRITERS = {
    "a file": bytes_with(write_atomic),
    "a record": bytes_with(write_exclusive),
    "rows": rows,
    "metrics": metrics,
    "a checkpoint": checkpoint(False),
    "a checkpoint in the background": checkpoint(True),
}


@pytest.mark.parametrize("free", [4096, 40_000, 200_000])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_with_what_is_free(writer, free, disk):
    for file in disk.rglob("*"):
        if file.is_file():
            file.unlink()
    (disk / "others").write_bytes(bytes(SIZE - free))
    with pytest.raises(Exception, match=r"the disk is full: [\d,]+ of its 262,144 bytes are free"):
        WRITERS[writer](disk)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("nbytes", "said"), [(None, "are free; make room"), (10**18, "to be written next, at least")]
)
def test_the_words_need_no_small_disk(nbytes, said):
    def write():
        with full_disk_named("/dev/full", nbytes), Path("/dev/full").open("wb") as file:
            file.write(b"x")

    with pytest.raises(OSError, match=f"the disk is full: .*{said}") as raised:
        write()
    assert raised.value.errno == errno.ENOSPC


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, full_disk_named(tmp_path / "x"):
        (tmp_path / "none" / "x").write_bytes(b"")
    assert "full" not in str(raised.value)
