"""README.md and docs/: every key is described, with its default, and what is shown to be typed can be typed."""

import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml

from siirl_dask.cli import main
from siirl_dask.configfile import load, shipped
from siirl_dask.configfile.layers import GROUPS

ROOT = Path(__file__).parents[1]
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
                    names, values = [f"trainer.{name}" for name in names], re.findall(r"\([^)]*\)|[^,\s][^,]*", shown)
                else:
                    values = [shown]
                yield from zip(names, values, strict=True)


def defaults():
    for group, kind in GROUPS.items():
        for field in fields(kind):
            value = field.default if field.default is not MISSING else field.default_factory()
            yield f"{group}.{field.name}", value


def is_of(shown, value):
    """Words stand for a default that is none, or that follows from other keys; nothing for a value that is needed."""
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
    wrong = [f"{key}: {text}, not {expected[key]!r}" for key, text in shown if not is_of(text, expected[key])]
    assert not wrong


def shown_commands():
    """Of each ``siirl-dask ...`` that stands in a line of its own."""
    found = [
        line for page in PAGES for line in re.findall(r"^(?:    |\$ )siirl-dask (.*)$", page.read_text(), re.MULTILINE)
    ]
    assert len(found) > 15
    return found


@pytest.mark.parametrize("line", shown_commands())
def test_what_is_shown_can_be_typed(line, capsys):
    command, *words = shlex.split(line, comments=True)
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    known = re.findall(r"--[a-z]+(?:-[a-z]+)*", capsys.readouterr().out)
    assert not [word for word in words if word.startswith("--") and word not in known]
    file = next((ROOT / word for word in words if word.startswith("configs/")), shipped("quickstart.yaml"))
    load(file, [word for word in words if re.match(r"[a-z_]+\.[a-z_]+=", word)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_linked_to_is_there(page):
    for to in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        name, _, section = to.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), to
        heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if section else []
        assert not section or section in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], to
