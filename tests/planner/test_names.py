"""Functions named by file: found once, spelled as they were given, and refused with the place
that is wrong.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.nodes import score
from siirl_dask.planner import dag_from_spec, dag_to_spec, resolve
from siirl_dask.planner.spec.names import function_name, load_named_spec
from siirl_dask.runs.reader import is_run

MINE = """
from dataclasses import dataclass
from collections.abc import Callable
LOADED = []
LOADED.append(1)

@dataclass
class Options:
    margin: float

def near(prompt, response, answer): return 0.5
def node(ctx, table, *, reward: Callable[..., float], options: Options | None = None): return table
def build(device, rank): return None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with ``rewards/mine.py``; what tests load from it is forgotten."""
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    "spelled", ["rewards/mine.py", "../{here}/rewards/mine.py", "{path}/rewards/mine.py"]
)
def test_a_function_of_a_file_is_named_as_it_was_spelled(folder, spelled):
    name = f"{spelled.format(here=folder.name, path=folder)}:near"
    found = resolve(name)
    assert found(prompt="", response="", answer="") == 0.5
    assert function_name(found) == name
    assert resolve(function_name(found)) is found


def test_a_file_is_loaded_once_however_it_is_spelled(folder):
    first = resolve("rewards/mine.py:near")
    again = [
        resolve(name)
        for name in (
            "rewards/mine.py:near",
            "./rewards/mine.py:near",
            f"{folder}/rewards/mine.py:near",
        )
    ]
    assert all(found is first for found in again)
    assert sys.modules[first.__module__].LOADED == [1]


def test_two_files_of_one_spelling_are_two(folder, monkeypatch):
    first = resolve("rewards/mine.py:near")
    other = folder / "elsewhere" / "rewards"
    other.mkdir(parents=True)
    (other / "mine.py").write_text("def near(prompt, response, answer): return 2.0\n")
    monkeypatch.chdir(other.parent)
    second = resolve("rewards/mine.py:near")
    assert (first("", "", ""), second("", "", "")) == (0.5, 2.0)
    assert resolve(function_name(second)) is second
    assert function_name(first) != function_name(second)


def test_a_dag_of_functions_in_files_reads_back_equal(folder):
    reward = {"reward": "rewards/mine.py:near", "options": {"margin": 1}}
    node = {"name": "a", "run": "rewards/mine.py:node", "role": "r", "with": reward}
    dag = dag_from_spec({"r": {"build": "rewards/mine.py:build"}}, [node])
    spec = json.loads(json.dumps(dag_to_spec(dag)))
    assert spec["nodes"][0]["run"] == "rewards/mine.py:node"
    assert spec["nodes"][0]["with"]["reward"]["run"] == "rewards/mine.py:near"
    assert spec["roles"]["r"]["build"] == "rewards/mine.py:build"
    again = dag_from_spec(**spec)
    assert again == dag
    assert again.nodes[0].options["options"].margin == 1.0


MINE_PY = "rewards/mine.py:f"
REFUSED = [
    # the file's text, the function's name, what is said
    (
        "",
        "rewards/mien.py:f",
        "'rewards/mien.py:f': there is no file 'rewards/mien.py' in {here}; did you mean 'rewards",
    ),
    ("", "none/mine.py:f", "there is no file 'none/mine.py'"),
    (
        "def first(): ...",
        "rewards/mine.py:frist",
        "file 'rewards/mine.py' has no function 'frist'; did you mean 'first'?",
    ),
    ("f = 1", MINE_PY, "file 'rewards/mine.py' has no function 'f', which is of type int"),
    (
        "from .other import helper",
        MINE_PY,
        "a file that imports with a dot is part of a package, and is named by its module, "
        "'rewards.mine'",
    ),
    (
        "\nx = 1 / 0",
        MINE_PY,
        "importing it fails at {here}/rewards/mine.py:2: ZeroDivisionError: division by zero",
    ),
    (
        "\nimport sys; sys.exit(4)",
        MINE_PY,
        "importing it fails at {here}/rewards/mine.py:2: SystemExit: 4",
    ),
    ("\ndef f(:", MINE_PY, "importing it fails at {here}/rewards/mine.py:2: SyntaxError: "),
    (
        "import nowhere_at_all",
        MINE_PY,
        "mine.py:1: ModuleNotFoundError: No module named 'nowhere_at_all'",
    ),
    (
        "",
        "rewards/mine.py",
        "'rewards/mine.py' names no function: expected 'module:function' or 'file.py:",
    ),
    ("raise SystemError", "rewards/mine.py:ne-ar", "'rewards/mine.py:ne-ar' names no function"),
    (
        "",
        "rewards.mine:f",
        "no module 'rewards.mine' on the Python path; for the file, write 'rewards/mine.py'",
    ),
]


@pytest.mark.parametrize(("text", "name", "said"), REFUSED, ids=lambda value: value[:30])
def test_refused(folder, text, name, said):
    (folder / "rewards" / "mine.py").write_text(text)
    with pytest.raises(PlanError, match=re.escape(said.format(here=folder))):
        resolve(name)


def test_a_file_that_failed_is_read_again_when_it_is_mended(folder):
    path = folder / "rewards" / "mended.py"
    path.write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(PlanError, match="RuntimeError: not yet"):
        resolve("rewards/mended.py:f")
    path.write_text("def f(): return 'now it is longer'\n")
    assert resolve("rewards/mended.py:f")() == "now it is longer"


def test_a_function_is_named_by_the_package_that_publishes_it():
    assert function_name(score) == "siirl_dask.nodes:score"
    assert resolve(function_name(score)) is score
    assert function_name(is_run).startswith("siirl_dask.runs.reader:")  # no package publishes it


def test_a_function_has_one_name_by_its_module_and_by_its_package():
    names = ("siirl_dask.nodes:score", "siirl_dask.nodes.reward:score")
    roles = {"r": {"build": "siirl_dask.tasks.tiny_model:tiny_tokenizer"}}
    by_package, by_module = (
        dag_from_spec(roles, [{"name": "a", "run": name, "role": "r"}]) for name in names
    )
    assert by_package == by_module
    assert dag_to_spec(by_module)["nodes"][0]["run"] == names[0]


class Options:
    """A class of which the module has no object."""


@pytest.mark.parametrize("attribute", ["near.more", "near ", "near-by", "a\u00b7b", ""])
def test_a_module_is_not_imported_for_what_cannot_be_a_name_in_it(folder, attribute):
    before = set(sys.modules)
    for find in (resolve, lambda name: load_named_spec("key", name, Options)):
        with pytest.raises(
            (PlanError, ConfigError), match=r"names no (function|Options): expected 'module:"
        ):
            find(f"rewards/mine.py:{attribute}")
    assert not [name for name in set(sys.modules) - before if name.endswith("mine.py")]


def test_an_object_is_found_by_its_class(folder):
    assert load_named_spec("key", "rewards/mine.py:LOADED", list) == [1]
    with pytest.raises(ConfigError, match=r"key: .*has no list 'LOADD'.*did you mean 'LOADED'"):
        load_named_spec("key", "rewards/mine.py:LOADD", list)
    with pytest.raises(ConfigError, match=r"has no list 'near', which is of type function"):
        load_named_spec("key", "rewards/mine.py:near", list)
