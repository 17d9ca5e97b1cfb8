"""The layers of the house: who may import whom, and who may know which third party (docs: architecture)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASE = ("errors", "schema", "context", "config", "configfile", "parameters", "pretrained")
COMMANDS = ("cli", "quickstart", "rollouts", "plan")
LAYERS = (
    {"siirl_storage"},
    set(BASE),
    {"planner", "algorithms", "rewards"},
    {"coordinator", "rollout", "training", "observe"},
    {"nodes", "worker"},
    {"run", "testing"},
    {"cli"},
)
"""Each imports only from those above it; names on one line do not import each other, but for BASE. The other modules
beside run.py are of run's layer, the commands beside cli.py of cli's."""
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
WORKER_SEES_NO = {"algorithms", "rewards", "rollout", "training"}  # nor any node: it runs whatever it is given
DASK = ("coordinator/dask_comms.py", "observe/dashboard.py", "worker/", "run.py", "driver.py", "cluster.py")
ONLY_IN = {
    "dask": DASK,
    "distributed": DASK,
    "transformers": ("parameters.py", "pretrained.py", "rollout/", "training/", "testing/"),
    "vllm": ("rollout/", "testing/"),
    "torch.distributed": ("worker/groups.py", "training/", "rollout/vllm_groups.py", "testing/"),
    "omegaconf": ("configfile/",),
    "yaml": ("configfile/",),
}
"""Third parties that only some files may import."""
NEEDS_ONLY = {
    "siirl_storage": {"pyarrow", "fsspec"},
    "planner": set(),
    "rewards": {"cloudpickle", "math_verify"},
    "algorithms": {"torch"},
    "errors": set(),
    "schema": {"pyarrow"},
    "context": set(),
    "config": set(),
    "parameters": {"transformers"},
    "pretrained": {"torch", "transformers"},
    "configfile": {"omegaconf", "yaml"},
}
"""Packages that may import nothing else of third parties. siirl_storage's conformance suite needs pytest as well."""


def sources() -> list[Path]:
    return sorted([*(ROOT / "siirl_dask").rglob("*.py"), *(ROOT / "storage" / "siirl_storage").rglob("*.py")])


def within(path: Path) -> str:
    """The path inside its package."""
    package = "siirl_dask" if "siirl_storage" not in path.parts else "siirl_storage"
    return path.relative_to(path.parents[path.parts[::-1].index(package) - 1]).as_posix()


def part_of(path: Path) -> str:
    """Which name of LAYERS a file belongs to."""
    return "siirl_storage" if "siirl_storage" in path.parts else part_named(within(path).split("/")[0])


def part_named(first: str) -> str:
    """The part that the first name below siirl_dask, a package or a module, belongs to."""
    name = first.removesuffix(".py")
    return "cli" if name in COMMANDS else name if name in LEVEL else "run"


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a file imports, anywhere in it, and of ``torch.distributed`` used by that name."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(source, names, level):
                above = ".".join(module.split(".")[:-level]) if level else ""
                origin = ".".join(filter(None, (above, source)))
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
            case ast.Attribute(ast.Name("torch"), "distributed"):
                yield node.lineno, "torch.distributed"


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def target_part(name: str) -> str | None:
    """The part of LAYERS that an imported name belongs to; None for third parties and for the package itself."""
    parts = name.split(".")
    if parts[0] == "siirl_storage":
        return "siirl_storage"
    if parts[0] != "siirl_dask" or len(parts) == 1:
        return None
    exists = (ROOT / "siirl_dask" / parts[1]).is_dir() or (ROOT / "siirl_dask" / f"{parts[1]}.py").is_file()
    return part_named(parts[1]) if exists else None


def test_every_module_is_in_a_layer():
    packages = {path.parent.name for path in (ROOT / "siirl_dask").glob("*/__init__.py")}
    assert packages <= set(LEVEL), f"not in a layer: {packages - set(LEVEL)}"
    assert len(sources()) > 20


@pytest.mark.parametrize("path", sources(), ids=lambda path: f"{part_of(path)}:{within(path)}")
def test_imports_go_up_the_layers(path):
    part = part_of(path)
    for line, name in imported(path):
        target = target_part(name)
        if target is None or target == part or (part in BASE and target in BASE):
            continue
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        assert LEVEL[target] < LEVEL[part], f"{where}, but {part!r} is not below {target!r}"
        assert part != "worker" or target not in WORKER_SEES_NO, f"{where}, but the worker sees no {target}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: f"{part_of(path)}:{within(path)}")
def test_third_parties_stay_where_they_belong(path):
    part = part_of(path)
    for line, name in imported(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package, places in ONLY_IN.items():
            if is_of(name, package) and part != "siirl_storage":
                assert within(path).startswith(places), f"{where}: {package} belongs in {', '.join(places)}"
        top = name.split(".")[0]
        if part in NEEDS_ONLY and top not in sys.stdlib_module_names and top not in ("siirl_dask", "siirl_storage"):
            allowed = NEEDS_ONLY[part] | ({"pytest"} if within(path) == "conformance.py" else set())
            assert top in allowed, f"{where}: {part} gets by with {sorted(allowed) or 'the standard library'}"


@pytest.mark.parametrize("path", [p for p in sources() if part_of(p) == "planner"], ids=within)
def test_the_planner_knows_only_errors_and_schema(path):
    parts = {target_part(name) for _, name in imported(path)} - {None}
    assert parts <= {"planner", "errors", "schema"}


@pytest.mark.parametrize("module", ["siirl_dask", "siirl_dask.planner", "siirl_dask.configfile"])
def test_an_import_is_light(module):
    heavy = ("torch", "dask", "distributed", "transformers", "vllm")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
