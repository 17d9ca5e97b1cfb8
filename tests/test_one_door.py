"""Devices have one door: nothing outside of siirl_dask/devices/ names a kind of accelerator in
its code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "siirl_dask", ROOT / "storage" / "siirl_storage")
DOOR = "siirl_dask/devices/"
APART = {
    "siirl_dask/training/megatron/": "Megatron-core itself says torch.cuda; what stands in for it must name it"
}
KINDS = re.compile(r"(?<![a-z])(cuda|npu|nccl|hccl|ascend)(?![a-z])", re.IGNORECASE)


def sources() -> list[Path]:
    files = (path for package in PACKAGES for path in package.rglob("*.py"))
    return sorted(
        path for path in files if not path.relative_to(ROOT).as_posix().startswith((DOOR, *APART))
    )


def documentation(tree: ast.Module) -> set[int]:
    """The ids of constants that are docstrings, of names as well."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in alone if isinstance(value, ast.Constant)}


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each kind of accelerator in code; prose, which has spaces, may speak of
    any.
    """
    prose = documentation(tree)
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=text)
                | ast.Attribute(attr=text)
                | ast.arg(arg=text)
                | ast.keyword(arg=str(text))
            ):
                pass
            case ast.alias(name=text):
                pass
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                pass
            case ast.Constant(value=str(text)) if id(node) not in prose and " " not in text.strip():
                pass
            case _:
                continue
        if KINDS.search(text):
            yield getattr(node, "lineno", 0), text


def test_no_kind_of_accelerator_is_named_elsewhere():
    found = [
        f"{path.relative_to(ROOT)}:{line} {text!r}"
        for path in sources()
        for line, text in named(ast.parse(path.read_text()))
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
        "f(cuda=1)",
    ],
)
def test_a_kind_in_code_is_seen(code):
    assert [*named(ast.parse(code))]


@pytest.mark.parametrize(
    "code", ['"""Of CUDA."""', "raise ValueError('nccl takes no two on one npu')", "input(x)"]
)
def test_prose_may_speak_of_devices(code):
    assert not [*named(ast.parse(code))]
