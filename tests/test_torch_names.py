"""Every name of torch and transformers that the product uses is there, and takes the arguments that
it is called with.

A machine with a GPU often comes with a torch of its own. A name or an argument that its version
lacks would end a run in the middle; here it is a line that fails.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1] / "siirl_dask"
LIBRARIES = ("torch", "transformers")
ASKED_FOR = {
    "torch.accelerator.empty_host_cache": 'if hasattr(torch.accelerator, "empty_host_cache"):',
    "torch._C._host_emptyCache": 'if hasattr(torch.accelerator, "empty_host_cache"):',
    "torch.distributed.all_gather_single": 'if hasattr(dist, "all_gather_single") else',
    "torch.distributed.new_group(sort_ranks=)": '"sort_ranks" in inspect.signature(dist.new_group).parameters',
}
"""Names and arguments that some versions lack, each with the check that a file makes before it
uses them."""


def sources() -> list[Path]:
    return sorted(
        path for path in ROOT.rglob("*.py") if any(name in path.read_text() for name in LIBRARIES)
    )


def of_libraries(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def names_in(tree: ast.AST) -> dict[str, str]:
    """The full name of a library behind each local name that a file's imports make."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                for alias in aliases:
                    if of_libraries(alias.name):
                        local = alias.asname or alias.name.partition(".")[0]
                        found[local] = alias.name if alias.asname else local
            case ast.ImportFrom(module=str(module), names=aliases, level=0) if of_libraries(module):
                for alias in aliases:
                    found[alias.asname or alias.name] = f"{module}.{alias.name}"
    return found


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` of an expression that is such a chain."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """The library's name for an expression; None for an expression that is none of its names."""
    chain = dotted(node)
    if chain is None:
        return None
    first, _, rest = chain.partition(".")
    if first not in names:
        return None
    return f"{names[first]}.{rest}" if rest else names[first]


def find(name: str) -> Any:
    """The object with a full name. AttributeError or ImportError where there is none; None past an
    object whose attributes are not known before it is used.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for position, part in enumerate(parts[1:], 2):
        if not isinstance(found, (types.ModuleType, type)):
            return None
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[:position]))
        else:
            found = getattr(found, part)
    return found


def lacking(name: str) -> str | None:
    """Return what is wrong with a name; None where it is there, or would be if a package of
    others were installed.
    """
    try:
        find(name)
    except ModuleNotFoundError as error:
        return f"{name}: {error}" if of_libraries(str(error.name)) else None
    except (AttributeError, ImportError) as error:
        # transformers' word for other packages
        return None if "requires the" in str(error) else f"{name}: {error}"
    return None


def refused_arguments(name: str, call: ast.Call) -> Iterator[str]:
    """Arguments by name that the function would not take."""
    try:
        parameters = inspect.signature(find(name)).parameters
    except (AttributeError, ImportError, TypeError, ValueError):
        # it is not there; it is one of C's; it is no function
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in parameters:
            yield f"{name}({keyword.arg}=)"


def faults_of(text: str) -> list[str]:
    """Names and arguments that a file uses and that are not there."""
    tree = ast.parse(text)
    names = names_in(tree)
    used = {*names.values()}
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full_name(node, names)) is not None:
            used.add(name)
        if isinstance(node, ast.Call) and (name := full_name(node.func, names)) is not None:
            calls.append((name, node))
    checked = {name for name, check in ASKED_FOR.items() if check in text}
    found = [fault for name in sorted(used - checked) if (fault := lacking(name)) is not None]
    for name, call in calls:
        found += [each for each in refused_arguments(name, call) if each not in checked]
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_uses_no_name_that_this_torch_or_transformers_lacks(path):
    assert faults_of(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import torch\ntorch.no_such_name", "no_such_name"),
        ("import torch.distributed as dist\ndist.no_such_name()", "no_such_name"),
        ("from torch.distributed.tensor import NoSuchTensor", "NoSuchTensor"),
        ("from torch.no_such_module import name", "no_such_module"),
        ("import torch\nclass A(torch.nn.NoSuchModule): pass", "NoSuchModule"),
        (
            "import torch.distributed as dist\ndist.new_group([0], no_such=True)",
            "new_group(no_such=)",
        ),
        ("def f():\n    from transformers import NoSuchModel", "NoSuchModel"),
    ],
)
def test_a_name_that_is_not_there_is_found(text, fault):
    (found,) = faults_of(text)
    assert fault in found
