"""Devices have one door: nothing outside of siirl_dask/devices/ names a kind of accelerator in
its code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import parsed
from tests.parsed import PACKAGES, ROOT, Nodes

DOOR = "siirl_dask/devices/"
APART = {
    "siirl_dask/training/megatron/": "Megatron-core itself says torch.cuda; what stands in for it must name it"
}
KINDS = re.compile(r"(?<![a-z])(cuda|npu|nccl|hccl|ascend)(?![a-z])", re.IGNORECASE)


def sources() -> list[Path]:
    return [
        path
        for path in parsed.files_below(*PACKAGES)
        if not path.relative_to(ROOT).as_posix().startswith((DOOR, *APART))
    ]


def prose(nodes: Nodes) -> set[ast.expr]:
    """Constants that stand alone: docstrings, of names as well."""
    return {node.value for node in nodes[ast.Expr] if isinstance(node.value, ast.Constant)}


def texts(nodes: Nodes) -> Iterator[tuple[ast.AST, str]]:
    """Every name and every string in code, with its node."""
    yield from ((node, node.id) for node in nodes[ast.Name])
    yield from ((node, node.attr) for node in nodes[ast.Attribute])
    for kind in (ast.arg, ast.keyword):
        yield from ((node, node.arg) for node in nodes[kind] if node.arg is not None)
    for kind in (ast.alias, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        yield from ((node, node.name) for node in nodes[kind])
    for node in nodes[ast.Constant]:
        if isinstance(node.value, str) and " " not in node.value.strip():
            yield node, node.value


def named(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Line and text of each kind of accelerator in code; prose, which has spaces, may speak of
    any.
    """
    found = [(node, text) for node, text in texts(nodes) if KINDS.search(text)]
    alone = prose(nodes) if found else set()
    yield from ((getattr(node, "lineno", 0), text) for node, text in found if node not in alone)


def test_no_kind_of_accelerator_is_named_elsewhere():
    found = [
        f"{path.relative_to(ROOT)}:{line} {text!r}"
        for path in sources()
        if KINDS.search(parsed.text_of(path))
        for line, text in named(parsed.nodes_of(path))
    ]
    assert len(sources()) > 400
    assert not found, "ask siirl_dask.devices"


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.is_available()",
        "import torch_npu",
        "DeviceKind.NPU",
        "x = 'cuda:0'",
        "os.environ['ASCEND_RT_VISIBLE_DEVICES']",
        "dist.is_nccl_available()",
        "def on_npu(): ...",
        "async def on_npu(): ...",
        "f(cuda=1)",
    ],
)
def test_a_kind_in_code_is_seen(code):
    assert [*named(parsed.by_kind(ast.parse(code)))]


@pytest.mark.parametrize(
    "code", ['"""Of CUDA."""', "raise ValueError('nccl takes no two on one npu')", "input(x)"]
)
def test_prose_may_speak_of_devices(code):
    assert not [*named(parsed.by_kind(ast.parse(code)))]
