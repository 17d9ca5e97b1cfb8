"""A place that cannot be written is refused in one line, by ``run``, ``eval``, ``export`` and
scripts, before a cluster starts.
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask import grpo
from siirl_dask.cli import main
from siirl_dask.commands import script
from siirl_dask.config.file import shipped
from siirl_dask.driver import launch_loop, single_pass
from tests.conftest import digits_overrides

CONFIG = str(shipped("quickstart.yaml"))
PLACES = {
    "file": "no folder that this user can write to",
    "file/below/it": "no folder that this user can write to",
    "nope://bucket/run": "cannot open 'nope://bucket/run': Protocol not known: nope",
    "s3://no-such-bucket/run": "cannot be written: ",
}


@pytest.fixture
def here(digits_task, tmp_path, monkeypatch):
    """A folder with a file, a model and a dataset, where no cluster can be started."""

    def refuse(config, progress):
        pytest.fail("a cluster was started")

    for module in (launch_loop, single_pass):
        monkeypatch.setattr(module, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "model").symlink_to(digits_task.model)
    pq.write_table(pa.table({"prompt": ["Digits 1:"], "answer": [""]}), tmp_path / "test.parquet")
    return tmp_path


def refusal(capsys, command, *arguments):
    """The one line that a command ends with."""
    with pytest.raises(SystemExit, match="2"):
        command(list(arguments))
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    return err


def train_script(arguments):
    script.main(grpo, arguments=arguments)


@pytest.fixture(params=PLACES)
def place(request):
    if request.param.startswith("s3:"):
        request.getfixturevalue("s3")
    return request.param


@pytest.mark.parametrize("flags", [[], ["--fresh"]], ids=["resumes", "fresh"])
@pytest.mark.parametrize(
    "command", [lambda arguments: main(["run", *arguments]), train_script], ids=["run", "script"]
)
def test_training_refuses_a_place_that_cannot_be_written(
    place, command, flags, here, digits_task, capsys
):
    err = refusal(capsys, command, *flags, CONFIG, *digits_overrides(digits_task, place))
    assert err.startswith(f"error: run.url={place!r}")
    assert PLACES[place] in err
    assert sorted(path.name for path in here.iterdir()) == ["file", "model", "test.parquet"]


def test_plan_refuses_what_can_be_judged_without_writing(here, digits_task, capsys):
    for place in ("file", "file/below/it", "nope://bucket/run"):
        err = refusal(capsys, main, "plan", CONFIG, *digits_overrides(digits_task, place))
        assert err.startswith(f"error: run.url={place!r}: ")
        assert PLACES[place] in err


def test_eval_refuses_a_place_that_cannot_be_written(place, here, capsys):
    said = {"file": "there is something at 'file' already: choose another --out"}.get(
        place, PLACES[place]
    )
    arguments = [
        "model",
        "--data",
        "test.parquet",
        "--out",
        place,
        "--workers",
        "1",
        "rollout.engine=transformers",
    ]
    assert said in refusal(capsys, main, "eval", *arguments)


def test_a_folder_that_this_user_may_not_write_to_is_refused(
    here, digits_task, capsys, monkeypatch
):
    (here / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    err = refusal(capsys, main, "run", CONFIG, *digits_overrides(digits_task, "closed/run"))
    assert f"run.url='closed/run': '{here}/closed' is no folder that this user can write to" in err
