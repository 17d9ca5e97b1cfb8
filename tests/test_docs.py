"""README.md and docs/: every key is described, with its default, and what is shown to be typed
can be typed.
"""

import ast
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml

from siirl_dask.cli import main
from siirl_dask.config import Config
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.config.file.layers import config_keys

ROOT = Path(__file__).parents[1]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SCOPES = (ast.Module, ast.ClassDef)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def described():
    """(key, the default that is shown) of each row of a table of keys."""
    for page in PAGES:
        for head, rows in re.findall(
            r"^\| (key|option) \| default \|.*\n.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
        ):
            for row in rows.splitlines():
                named, shown = re.split(r" *(?<!\\)\| *", row.strip("| "))[:2]
                names = re.findall(r"`([\w.]+)`", named)
                if head == "option":
                    names, values = (
                        [f"trainer.{name}" for name in names],
                        re.findall(r"\([^)]*\)|[^,\s][^,]*", shown),
                    )
                else:
                    values = [shown]
                yield from zip(names, values, strict=True)


def defaults():
    for key in config_keys():
        value = Config()
        *groups, name = key.split(".")
        for group in groups:
            value = getattr(value, group)
        field = next(field for field in fields(value) if field.name == name)
        yield key, field.default if field.default is not MISSING else field.default_factory()


def is_of(shown, value):
    """Words stand for a default that is none, or that follows from other keys; nothing for a
    value that is needed.
    """
    if value is None or (value == [] and shown != "`[]`"):
        return bool(shown)
    if value == "???":
        return not shown
    said = yaml.safe_load(shown.strip("`").replace("(", "[").replace(")", "]"))
    said = float(said) if isinstance(value, float) else said
    return said == (list(value) if isinstance(value, tuple) else value)


def test_every_key_is_described_once_with_its_default():
    shown = list(described())
    expected = {key: value for key, value in defaults() if not key.startswith("critic.")}
    assert sorted(key for key, _ in shown) == sorted(expected)
    wrong = [
        f"{key}: {text}, not {expected[key]!r}"
        for key, text in shown
        if not is_of(text, expected[key])
    ]
    assert not wrong


def shown_commands():
    """Return the arguments of each ``siirl-dask ...`` that stands in a line of its own."""
    found = [
        line
        for page in PAGES
        for line in re.findall(r"^(?:    |\$ )siirl-dask (.*)$", page.read_text(), re.MULTILINE)
    ]
    assert len(found) > 15
    return found


@pytest.mark.parametrize("line", shown_commands())
def test_what_is_shown_can_be_typed(line, capsys):
    command, *words = shlex.split(line, comments=True)
    with pytest.raises(SystemExit, match="0"):
        main([command, *words[: command == "data"], "--help"])
    known = re.findall(r"--[a-z]+(?:-[a-z]+)*", capsys.readouterr().out)
    assert not [word for word in words if word.startswith("--") and word not in known]
    file = next(
        (ROOT / word for word in words if word.startswith("configs/")), shipped("quickstart.yaml")
    )
    load_config_file(file, [word for word in words if re.match(r"[a-z_]+\.[a-z_]+=", word)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_linked_to_is_there(page):
    for to in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        name, _, section = to.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), to
        heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if section else []
        assert not section or section in [
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
        ], to


def shown_tree(page):
    """Paths that the page's tree shows, from the top of the repository."""
    block = re.search(r"^    siirl_dask/\n(?:    .*\n)+", page.read_text(), re.MULTILINE)[0]
    open_folders, paths = {}, set()
    for line in block.splitlines():
        depth = len(line) - len(line.lstrip())
        parent = next(
            (path for level, path in sorted(open_folders.items(), reverse=True) if level < depth),
            "",
        )
        open_folders = {level: path for level, path in open_folders.items() if level < depth}
        names = [
            word
            for word in re.split(r"  +", line.strip())
            if re.fullmatch(r"[\w./]+(?:\.py|/)", word)
        ]
        for name in names:
            paths.add(f"{parent}{name}")
            open_folders[depth] = f"{parent}{name}" if name.endswith("/") else parent
    return paths


def rooms():
    folders = (path.parent for path in (ROOT / "siirl_dask").rglob("*.py"))
    return {
        f"{folder.relative_to(ROOT).as_posix()}/"
        for folder in folders
        if "configs" not in folder.parts
    }


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "architecture.md"], ids=lambda page: page.name
)
def test_the_tree_that_is_shown_is_the_tree_on_disk(page):
    shown = shown_tree(page)
    assert not [path for path in shown if not (ROOT / path).exists()]
    top = {room for room in rooms() if room.count("/") <= 2}
    assert top <= shown, f"not shown: {sorted(top - shown)}"


def test_the_architecture_page_shows_every_room_and_every_loose_module():
    shown = shown_tree(ROOT / "docs" / "architecture.md")
    # in the lines of their parents
    told = {room for room in rooms() if not re.search(r"vllm_engine|config/file", room)}
    assert told <= shown, f"not shown: {sorted(told - shown)}"
    loose = {f"siirl_dask/{path.name}" for path in (ROOT / "siirl_dask").glob("*.py")} - {
        "siirl_dask/__init__.py"
    }
    assert loose <= shown
    assert len(loose) <= 9, "a module that lies loose belongs into a room"


def reading_path():
    """(files, lines, names that are left out) of each stop of the architecture page."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for row in re.findall(r"^\| \d\. .*$", text, re.MULTILINE):
        _, read, lines, _, left_out = row.strip("| ").split(" | ")
        files = re.findall(r"`([\w/]+\.py)`", read)
        yield files, int(lines.replace(",", "")), re.findall(r"`([\w.]+)`", left_out)


def test_the_reading_path_names_what_is_there_and_tells_its_length():
    stops = list(reading_path())
    assert len(stops) == 9
    for files, told, left_out in stops:
        lines = 0
        missing = set(left_out)
        for file in files:
            source = (ROOT / "siirl_dask" / file).read_text()
            lines += len(source.splitlines())
            tree = ast.parse(source)
            for parent in ast.walk(tree):
                for node in getattr(parent, "body", []) if isinstance(parent, SCOPES) else []:
                    if not isinstance(node, DEFINITIONS):
                        continue
                    whole = f"{parent.name}.{node.name}" if parent is not tree else node.name
                    if {node.name, whole} & set(left_out):
                        lines -= node.end_lineno - node.lineno + 1
                        missing -= {node.name, whole}
        assert not missing, f"{files} have no {sorted(missing)}"
        assert abs(lines - told) <= 0.1 * lines, f"{files} have {lines} lines to read, not {told}"


def test_every_module_that_the_architecture_page_names_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert list((ROOT / "siirl_dask").rglob(name)) or (ROOT / name).exists(), name
