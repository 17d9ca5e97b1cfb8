"""``siirl-dask configs``: lists the configurations that come with the package, or prints one."""

from __future__ import annotations

import argparse
import re
from itertools import takewhile

from siirl_dask.commands.program.terminal import output_columns
from siirl_dask.config.file import SHIPPED, shipped, shipped_files, shipped_folder

_FOLDERS = {"": "Configs of a run", "dags": "DAGs, on which configs stand"}
_SUFFIX = ".yaml"
_PAPERS = re.compile(r" \((?:arXiv:[\d.]+(?:, )?)+\)|, arXiv:[\d.]+")
_BASE = re.compile(r"^base: .*$", re.MULTILINE)
_FILE = re.compile(r"[\w./-]+\.yaml")


def add_configs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="such as quickstart; default: list all",
    )
    parser.epilog = (
        f"Wherever a command takes CONFIG, {SHIPPED}NAME is the file of that name, and a file of "
        f"yours begins with `base: {SHIPPED}NAME`. To change a copy: siirl-dask configs NAME > "
        "mine.yaml"
    )


def show_configs(options: argparse.Namespace) -> None:
    """Print one configuration, or a line for each. ConfigError for a name that there is not."""
    if options.name is not None:
        print(copy_of(options.name.removeprefix(SHIPPED)), end="")
        return
    files = shipped_files()
    width = max(map(len, files)) - len(_SUFFIX)
    room = output_columns()
    for folder, title in _FOLDERS.items():
        print(title)
        for name in sorted(files):
            if name.rpartition("/")[0] == folder:
                line = _first_sentence(files[name].read_text(encoding="utf-8"))
                shown = f"  {name.removesuffix(_SUFFIX):<{width}}  {line}"
                print(shown if len(shown) < room else f"{shown[: room - 4]}...")
        print()
    print(f"siirl-dask plan {SHIPPED}quickstart          what a config would do")
    print("siirl-dask configs quickstart > mine.yaml    a copy of your own, to change")


def copy_of(name: str) -> str:
    """Return the text of a shipped configuration, with bases that are found from any folder.
    ConfigError for a name that there is not.
    """
    path = shipped(name)
    folder = path.relative_to(shipped_folder()).parent

    def shipped_base(file: re.Match[str]) -> str:
        return f'"{SHIPPED}{(folder / file[0]).as_posix()}"'

    text = path.read_text(encoding="utf-8")
    return _BASE.sub(lambda line: _FILE.sub(shipped_base, line[0]), text)


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment that a file begins with, without references to
    papers.
    """
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return _PAPERS.sub("", comment).partition(". ")[0].rstrip(".")
