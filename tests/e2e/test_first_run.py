"""docs/first-run.md, block by block: its files are written, its commands typed in their order."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from tests.forked_programs import run_forked

PAGE = Path(__file__).parents[2] / "docs" / "first-run.md"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_DOWNLOADED = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
# The engine of the page is whichever is there: vLLM takes a quarter of a minute to start, each time
_HERE = {_DOWNLOADED: "models/tiny", "rollout: {n: 8,": "rollout: {engine: transformers, n: 8,"}


@dataclass
class Block:
    """A block of the page: a file, or commands."""

    kind: str
    title: str
    text: str


def blocks():
    text = PAGE.read_text()
    after_installing = text[text.index("## Data") :]
    return [Block(*found) for found in _BLOCK.findall(after_installing)]


def commands():
    """Words of each command of the page, in their order."""
    return [
        shlex.split(line.removeprefix("$ "))
        for block in blocks()
        if block.kind == "console"
        for line in block.text.splitlines()
    ]


def test_every_command_of_the_page_is_one_that_this_test_can_type():
    assert len(commands()) > 12
    assert {words[0] for words in commands()} == {"python", "siirl-dask"}
    assert {block.kind for block in blocks()} == {"console", "python", "yaml"}
    assert _DOWNLOADED in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_goes_from_rows_to_a_model_that_transformers_loads(tmp_path):
    here = tmp_path / "first"
    here.mkdir()
    tiny_model(here / "models" / "tiny", chat_template=CHAT_TEMPLATE)
    printed = {}
    for block in blocks():
        if block.title:
            text = block.text
            for on_the_page, in_the_test in _HERE.items():
                text = text.replace(on_the_page, in_the_test)
            (here / block.title).write_text(text)
            continue
        for line in block.text.splitlines():
            program, *words = shlex.split(line.removeprefix("$ "))
            if program == "siirl-dask":
                words = ["-m", "siirl_dask.cli", *words]
            done = run_forked(*words, folder=tmp_path, cwd=here)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            printed[line.removeprefix("$ ")] = done.stdout
    rows = pq.read_table(here / "runs" / "first" / "rollouts" / "step=000020")
    assert len(rows) == 16 * 8
    # a chat model sees the question as a user's message
    assert rows["prompt"][0].as_py()[0]["role"] == "user"
    assert (here / "runs" / "first" / "rollouts" / "step=000025").is_dir()
    assert (here / "models" / "first" / "model.safetensors").is_file()
    assert "== first prompt ==" in printed["siirl-dask plan first.yaml"]
    assert "reward" in printed["python first.py"]
