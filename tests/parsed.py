"""Python files of this repository, each read and parsed once a process for all tests that look
through them.
"""

from __future__ import annotations

import ast
import atexit
import gc
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("siirl_dask", "storage/siirl_storage")
"""Folders of what is installed."""
Nodes = defaultdict[type[ast.AST], list[ast.AST]]
"""The nodes of a file by their kind, those of a kind in the order of ``ast.walk``."""


@cache
def files_below(*folders: str) -> tuple[Path, ...]:
    """Return the Python files below folders of the repository, sorted."""
    return tuple(sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax of a file, for reading: no test changes it."""
    text = text_of(path)
    enabled = gc.isenabled()
    gc.disable()
    try:
        tree = ast.parse(text)
    finally:
        # it stays and has no circles: to look for some in all trees takes longer than to parse them
        gc.freeze()
        if enabled:
            gc.enable()
    return tree


@cache
def nodes_of(path: Path) -> Nodes:
    """Return the nodes of a file by kind."""
    return by_kind(tree_of(path))


def by_kind(tree: ast.AST) -> Nodes:
    """Return the nodes of a tree by kind: a look at those of one kind does not walk the others."""
    nodes: Nodes = defaultdict(list)
    for node in ast.walk(tree):
        nodes[type(node)].append(node)
    return nodes


@atexit.register
def forget() -> None:
    """Free all trees: where they are there still, Python looks for circles in them at its end."""
    nodes_of.cache_clear()
    tree_of.cache_clear()
