"""A task that several starts prepare at once is whole, and half a task is made again."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.config import Config, DataConfig, ModelConfig
from siirl_dask.driver.phases import prepare
from siirl_dask.tasks.preparing import prepare_task, written_whole

FILES = ("config.json", "model.safetensors", "tokenizer.json")
PREPARE = """
import sys
from tests.tasks.test_preparing import config_of, prepare
print(prepare(config_of(sys.argv[1])))
"""
WRITE = """
import sys
from pathlib import Path
from tests.tasks.test_preparing import write
write(Path(sys.argv[1]))
"""


def config_of(folder):
    """A run whose task and model lie in one folder."""
    data = DataConfig(url=f"{folder}/train.parquet", prepare="tests.tasks.test_preparing:recipe")
    return Config(data=data, model=ModelConfig(path=f"{folder}/model"))


def recipe(config):
    prepare_task(config, write, "{:.0%}")


def write(folder, *, seed=0, progress=None):
    """A task like those that are shipped, file after file, the training data last. Each writer
    leaves a mark.
    """
    with written_whole(Path(folder) / "model") as unfinished:
        unfinished.mkdir()
        for name in FILES:
            (unfinished / name).write_text("{}")
            time.sleep(0.2)
    made = Path(folder) / "made"
    made.write_text(f"{made.read_text() if made.exists() else ''}x")
    pq.write_table(pa.table({"prompt": ["1"], "answer": ["1"]}), Path(folder) / "train.parquet")


def at_once(code, folder, count=3):
    """Run ``code`` in processes, the later ones while the first writes."""
    processes = []
    for _ in range(count):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
            )
        )
        time.sleep(0.1)
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return said


def is_whole(folder):
    return {path.name for path in (folder / "model").iterdir()} == set(FILES)


def test_of_starts_that_prepare_one_task_at_once_one_makes_it(tmp_path):
    folder = tmp_path / "task"
    at_once(PREPARE, folder)
    assert is_whole(folder)
    assert (folder / "made").read_text() == "x"


def test_a_model_that_is_written_twice_at_once_is_whole(tmp_path):
    """The first one's folder was renamed away under the second: one was left without a
    tokenizer.
    """
    at_once(WRITE, tmp_path)
    assert is_whole(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".model")] == []


@pytest.mark.parametrize("lost", [*FILES, "all"])
def test_half_a_model_is_made_again_and_a_whole_one_is_not(tmp_path, lost):
    config = config_of(tmp_path)
    assert prepare(config)
    assert not prepare(config)
    for name in FILES if lost == "all" else [lost]:
        (tmp_path / "model" / name).unlink()
    assert prepare(config)
    assert is_whole(tmp_path)
    assert not prepare(config)


def test_a_model_that_lies_elsewhere_is_not_the_recipes_to_make(tmp_path):
    config = replace(config_of(tmp_path / "task"), model=ModelConfig(path=str(tmp_path / "mine")))
    assert prepare(config)
    assert not prepare(config)


def write_text_twice(folder):
    folder.mkdir()
    (folder / "config.json").write_text("half")
    folder.mkdir()


def test_what_fails_halfway_leaves_what_was_there(tmp_path):
    model = tmp_path / "model"
    write(tmp_path)
    with pytest.raises(FileExistsError), written_whole(model) as unfinished:
        write_text_twice(unfinished)
    assert is_whole(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".model")] == []


def test_a_warm_start_without_a_terminal_says_where_it_is_each_tenth(tmp_path, capsys):
    config = Config(data=DataConfig(url=str(tmp_path / "task" / "train.parquet")))

    def write(folder, /, *, seed, progress):
        for step in range(1, 201):
            progress(step, 200, step / 400)

    prepare_task(config, write, "finds {:.0%}")
    first, *lines = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "task") in first
    assert len(lines) == 10
    assert lines[4] == "warm start  step 100 of at most 200, finds 25%"
