"""A file that cannot be read or written is one sentence, from every command: never a traceback."""

import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import pytest

from tests.forked_programs import run_forked
from tests.written_runs import whole_run

DROP_CAPABILITY = 24  # of prctl
OVERRIDES = (1, 2)  # capabilities of root: to write and to read what a file's mode forbids
COMMAND = [sys.executable, "-m", "siirl_dask"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that may be read, and not written."""
    url = Path(whole_run(tmp_path_factory.mktemp("run") / "mine"))
    folders = [url, *(path for path in url.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield url
    for folder in folders:
        folder.chmod(0o755)


def as_any_other_user():
    """Let this process lose what root may do with any file."""
    for capability in OVERRIDES:
        CDLL(None).prctl(DROP_CAPABILITY, capability, 0, 0, 0)


def sentence(done):
    """The one line on stderr."""
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["rollouts", "{run}"], ["trace", "{run}"], ["configs"]],
    ids=lambda arguments: arguments[0],
)
def test_a_full_disk_under_the_output_is_named(arguments, run):
    arguments = [text.format(run=run) for text in arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=100
        )
    assert "No space left on device" in sentence(done)


@pytest.mark.parametrize(
    "arguments",
    [
        ["clean", "{run}"],
        ["migrate", "-o", "{run}/mine.yaml", "verl.yaml"],
        ["export", "{run}", "{run}/model"],
        ["trace", "{run}", "-o", "{run}/trace.json"],
        ["rollouts", "{run}", "--best", "--html", "{run}/page.html"],
        ["report", "{run}", "-o", "{run}/report.html"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_place_of_another_user_is_named(arguments, run, tmp_path):
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {rollout: {n: 4}}\n")
    done = subprocess.run(
        [*COMMAND, *(text.format(run=run) for text in arguments)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=as_any_other_user,
    )
    assert str(run) in sentence(done)


@pytest.mark.parametrize("command", ["report", "trace", "migrate"])
def test_a_folder_that_is_not_there_is_not_made_for_one_file(command, run, tmp_path):
    to = tmp_path / "misspelt" / "file"
    verl = tmp_path / "verl.yaml"
    verl.write_text("actor_rollout_ref: {rollout: {n: 4}}\n")
    source = str(verl) if command == "migrate" else str(run)
    done = run_forked("-m", "siirl_dask", command, source, "-o", to, folder=tmp_path)
    assert f"there is no folder '{to.parent}'" in sentence(done)
    assert not to.parent.exists()
