"""Two starts of one run: the one that is cut off and wakes up later damages nothing. What is
damaged is not used.
"""

import shutil
import signal
import time

import pytest
from siirl_storage import open_fs, open_table, write_atomic

from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.errors import CheckpointError
from siirl_dask.observe import read_metrics
from siirl_dask.runs.checkpoints import (
    checkpoint_url,
    committed,
    find_checkpoint,
    find_checkpoints,
    read_state,
)
from siirl_dask.training.files.checkpoint import read_model
from tests.conftest import digits_overrides
from tests.slowdown import Slowdown

ONE = ["cluster.workers=1", "cluster.placement={}", "checkpoint.every=1", "checkpoint.keep=1000"]
EXACT = ["row_id", "prompt", "response_ids", "reward", "weights_version", "advantage"]


@pytest.fixture(
    params=[
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("s3", marks=pytest.mark.sweep),
    ]
)
def url(request, tmp_path):
    return (
        str(tmp_path / "run")
        if request.param == "local"
        else f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    )


def being_written(url):
    """The checkpoint folders that nobody has committed yet."""
    fs, path = open_fs(f"{url}/checkpoints")
    try:
        there = {str(folder).rstrip("/").rpartition("/")[2] for folder in fs.ls(path, detail=False)}
    except FileNotFoundError:
        return set()
    return there - {found.url.rpartition("/")[2] for found in find_checkpoints(url)}


def files(url):
    fs, path = open_fs(url)
    return set(fs.find(path))


def test_a_driver_that_is_stopped_and_wakes_up_is_fenced_and_deletes_nothing(start, train, url):
    """It is stopped while it writes a checkpoint; its successor commits two and is still at work
    when it goes on.
    """
    first = start(*ONE, f"run.url={url}", "run.lease=2", "run.steps=100000")
    first.wait_until(lambda: len(committed(url)) > 1 and being_written(url))
    first.process.send_signal(signal.SIGSTOP)
    before, (half, *_) = (
        committed(url),
        [*being_written(url), "none: it was committed at the last moment"],
    )
    second = start(
        *ONE,
        f"run.url={url}",
        "run.lease=2",
        f"run.steps={before[-1] + 8}",
        "observe.progress=true",
    )
    second.wait_until(lambda: len(committed(url)) >= len(before) + 2)
    there = files(url)
    first.process.send_signal(signal.SIGCONT)
    _, _, told = first.end(60)
    assert first.process.returncode == 1
    assert f"was taken over by process {second.process.pid} of" in told
    _, said, complaints = second.end(90)
    assert second.process.returncode == 0, complaints
    assert f"waiting for up to 2 s for a sign of life of process {first.process.pid}" in said
    # the successor's own go when they are spent
    gone = {name for name in there - files(url) if "/stages/" not in name}
    assert not {name for name in gone if half not in name and not name.endswith(".tmp")}
    last = before[-1] + 8
    straight = train("straight", *ONE, f"run.steps={last}")
    assert committed(url) == list(range(1, last + 1))
    for step in committed(url):
        find_checkpoint(url, step).verify()
        ours, theirs = (
            read_model(f"{checkpoint_url(place, step)}/policy")
            for place in (url, str(straight.url))
        )
        assert all(ours[name].equal(theirs[name]) for name in theirs), step
        rows = (
            open_table(f"{url}/rollouts/step={step:06d}").to_table().sort_by("row_id").select(EXACT)
        )
        assert rows.equals(straight.table("rollouts", step).select(EXACT)), step


@pytest.mark.slow
def test_a_second_start_is_refused_while_the_first_is_alive_and_changes_nothing(
    start, digits_task, tmp_path, capsys
):
    first = start(*ONE, "run.steps=100000", "run.lease=6")
    first.wait_for_steps(1)
    began = time.monotonic()
    with Slowdown() as measured, pytest.raises(SystemExit, match="2"):
        main(
            [
                "run",
                str(shipped("quickstart.yaml")),
                *digits_overrides(digits_task, first.url),
                *ONE,
                "--fresh",
            ]
        )
    assert time.monotonic() - began < 6 * measured.factor
    assert f"is being trained, by process {first.process.pid} of " in capsys.readouterr().err
    assert first.steps() >= 1
    first.process.send_signal(signal.SIGINT)
    first.end(60)


def flip(fs, path, bit):
    data = bytearray(fs.cat_file(path))
    data[bit // 8] ^= 1 << bit % 8
    write_atomic(fs, path, bytes(data))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_said_so(train, caplog, name):
    """One bit in the middle of a file: the run goes on from the checkpoint before, and ends as
    if nothing had been.
    """
    run = train("run", *ONE, "run.steps=3")
    url = str(run.url)
    straight = read_model(f"{checkpoint_url(url, 3)}/policy")
    fs, path = open_fs(f"{checkpoint_url(url, 3)}/policy/{name}")
    flip(fs, path, fs.size(path) * 4)
    again = train("run", *ONE, "run.steps=4")
    assert f"the checkpoint of step 3 is damaged: {path} has the SHA-256" in caplog.text
    assert [record["step"] for record in again.records()] == [1, 2, 3, 4]
    assert (committed(url), read_state(url, 3).step) == ([1, 2, 3, 4], 3)
    repeated = read_model(f"{checkpoint_url(url, 3)}/policy")
    assert all(repeated[key].equal(straight[key]) for key in straight)


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew(train):
    run = train("run", *ONE, "run.steps=1")
    fs, path = open_fs(f"{checkpoint_url(str(run.url), 1)}/policy/__0_0.distcp")
    flip(fs, path, 8 * 100)
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint that can be used: the checkpoint of step 1 is .*--fresh",
    ):
        train("run", *ONE, "run.steps=2")
    assert run.table("rollouts", 1).num_rows


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "removed"])
def test_a_run_whose_folder_goes_away_ends_and_says_where_its_weights_are(start, tmp_path, moved):
    """It says so at its next step, and never that it is complete; a second run there is not
    disturbed.
    """
    run = start(*ONE, "run.steps=100000")
    run.wait_until(lambda: len(committed(str(run.url))) > 1)
    run.url.rename(tmp_path / "elsewhere")
    newest = committed(str(tmp_path / "elsewhere"))[-1]
    if not moved:
        shutil.rmtree(tmp_path / "elsewhere")
    _, _, told = run.end(60)
    assert run.process.returncode == 1
    assert not (run.url / "summary.json").exists()
    if moved:
        assert f"was moved to {tmp_path / 'elsewhere'} under this start" in told
        assert f"the newest checkpoint that is left, after step {newest} of" in told
        find_checkpoint(str(tmp_path / "elsewhere"), newest).verify()
    else:
        assert "was moved or removed under this start" in told
        assert "what was trained since the newest of them is gone" in told


@pytest.mark.slow
def test_a_forgotten_start_does_not_train_in_the_folder_of_a_new_one(start):
    """The folder is removed under it, and a new start takes it: both have the number 1."""
    forgotten = start(*ONE, "run.steps=100000", "trainer.lr=1e-3")
    forgotten.wait_for_steps(2)
    shutil.rmtree(forgotten.url, ignore_errors=True)
    shutil.rmtree(forgotten.url, ignore_errors=True)
    new = start(*ONE, "run.steps=4", "trainer.lr=1e-5")
    _, _, told = forgotten.end(60)
    assert forgotten.process.returncode == 1
    assert "FolderGone" in told or "under this start" in told
    _, _, complaints = new.end(90)
    assert new.process.returncode == 0, complaints
    rates = {
        record["metrics"]["policy/lr"]
        for record in read_metrics(str(new.url))
        if record["phase"] == "train"
    }
    assert max(rates) <= 1e-5
