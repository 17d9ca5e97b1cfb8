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
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import parsed
from tests.parsed import ROOT, Nodes

LIBRARIES = ("torch", "transformers")
ASKED_FOR = {
    "torch.accelerator.empty_host_cache": 'if hasattr(torch.accelerator, "empty_host_cache"):',
    "torch._C._host_emptyCache": 'if hasattr(torch.accelerator, "empty_host_cache"):',
    "torch.distributed.all_gather_single": 'if hasattr(dist, "all_gather_single") else',
    "torch.distributed.new_group(sort_ranks=)": '"sort_ranks" in inspect.signature(dist.new_group).parameters',
}
"""Names and arguments that some versions lack, each with the check that a file makes before it
uses them."""


def sources(library: str) -> list[Path]:
    files = parsed.files_below("siirl_dask")
    return [path for path in files if library in parsed.text_of(path)]


def of_libraries(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def names_in(nodes: Nodes) -> dict[str, str]:
    """The full name of a library behind each local name that a file's imports make."""
    found = {}
    for node in nodes[ast.Import]:
        for alias in node.names:
            if of_libraries(alias.name):
                local = alias.asname or alias.name.partition(".")[0]
                found[local] = alias.name if alias.asname else local
    for node in nodes[ast.ImportFrom]:
        if node.level == 0 and of_libraries(str(node.module)):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
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


@cache
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


@cache
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


@cache
def parameters_of(name: str) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function; None where it is not there, is one of C's, or is none."""
    try:
        return inspect.signature(find(name)).parameters
    except (AttributeError, ImportError, TypeError, ValueError):
        return None


def refused_arguments(name: str, call: ast.Call) -> Iterator[str]:
    """Arguments by name that the function would not take."""
    parameters = parameters_of(name)
    if parameters is None:
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in parameters:
            yield f"{name}({keyword.arg}=)"


def faults_of(nodes: Nodes, text: str, library: str) -> list[str]:
    """Names of a library, and arguments, that a file uses and that are not there."""
    names = names_in(nodes)
    used = {*names.values()}
    for node in nodes[ast.Attribute]:
        if (name := full_name(node, names)) is not None:
            used.add(name)
    checked = {name for name, check in ASKED_FOR.items() if check in text}
    asked = sorted(name for name in used - checked if is_of(name, library))
    found = [fault for name in asked if (fault := lacking(name)) is not None]
    for call in nodes[ast.Call]:
        name = full_name(call.func, names)
        if name is not None and is_of(name, library):
            found += [each for each in refused_arguments(name, call) if each not in checked]
    return found


def is_of(name: str, library: str) -> bool:
    return name.partition(".")[0] == library


@pytest.mark.parametrize(("library", "least"), [("torch", 150), ("transformers", 20)])
def test_no_file_uses_a_name_that_this_torch_or_transformers_lacks(library, least):
    files = sources(library)
    assert len(files) > least
    faults = {
        path.relative_to(ROOT).as_posix(): faults_of(
            parsed.nodes_of(path), parsed.text_of(path), library
        )
        for path in files
    }
    assert {path: found for path, found in faults.items() if found} == {}


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
    library = "transformers" if "transformers" in text else "torch"
    (found,) = faults_of(parsed.by_kind(ast.parse(text)), text, library)
    assert fault in found
