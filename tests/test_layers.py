"""The layers of the house: who may import whom, and who may know which third party (see
docs/architecture.md).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import parsed
from tests.parsed import PACKAGES, ROOT

LAYERS = (
    {"siirl_storage"},
    {
        "errors",
        "schema",
        "context",
        "devices",
        "coerce",
        "collectives",
        "pickling",
        "trace",
        "models",
        "config",
        "dask_internals",
        "http_client",
        "tables",
        "wording",
    },
    {"planner"},
    {"algorithms", "rewards", "images", "comms"},
    {"coordinator", "rollout", "training", "observe", "environments"},
    {"nodes", "worker", "runs", "tasks", "datasets"},
    {"recipes", "scheduler", "views", "estimates"},
    {"driver"},
    {"commands", "testing"},
    {"cli"},
    {"__init__", "__main__"},
)
"""Rooms and modules of the package. Each imports only from the layers above its own; names on one
line do not import each other, but for the second line, which is the ground that all stand on: there
they do, and in no circle."""
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
GROUND = LAYERS[1]
# nor any node: it runs whatever it is given
WORKER_SEES_NO = {"algorithms", "rewards", "rollout", "training"}
DASK = (
    "dask_internals.py",
    "comms/",
    "coordinator/transport/carriers.py",
    "worker/",
    "scheduler/",
    "driver/",
    "views/dashboard/",
)
ONLY_IN = {
    "dask": DASK,
    "distributed": DASK,
    "bokeh": ("views/dashboard/",),
    "tokenizers": ("runs/", "tasks/"),
    "PIL": ("images/", "tasks/", "testing/"),
    "transformers": (
        "models/",
        "images/",
        "rollout/",
        "environments/",
        "training/",
        "tasks/",
        "testing/",
    ),
    "vllm": ("rollout/", "testing/"),
    "sglang": ("rollout/sglang_engine/",),
    "torch.distributed": (
        "collectives.py",
        "worker/groups/process_groups.py",
        "training/",
        "rollout/vllm_engine/process_groups.py",
        "rollout/process_engine/ranks.py",
        "testing/",
    ),
    "omegaconf": ("config/file/",),
    "yaml": ("config/file/",),
}
"""Third parties that only some files may import."""
NEEDS_ONLY = {
    "siirl_storage": {"pyarrow", "fsspec"},
    "planner": set(),
    "rewards": {"math_verify", "reasoning_gym"},
    "pickling": {"cloudpickle"},
    "algorithms": {"torch"},
    "errors": set(),
    "schema": {"pyarrow"},
    "tables": {"numpy", "pyarrow"},
    "wording": set(),
    "context": set(),
    "trace": set(),
    "coerce": set(),
    "devices": {"torch"},
    "collectives": {"torch", "psutil"},
    "comms": {"dask", "distributed", "msgpack", "numpy", "ucxx"},
    "config": {"omegaconf", "yaml"},
    "images": {"PIL", "fsspec", "numpy", "pyarrow", "torch", "transformers"},
    "models": {"filelock", "fsspec", "huggingface_hub", "safetensors", "torch", "transformers"},
}
"""Packages that may import nothing else of third parties. siirl_storage's conformance suite
needs pytest as well."""


def sources() -> tuple[Path, ...]:
    return parsed.files_below(*PACKAGES)


@cache
def within(path: Path) -> str:
    """The path inside its package."""
    package = "siirl_dask" if "siirl_storage" not in path.parts else "siirl_storage"
    return path.relative_to(path.parents[path.parts[::-1].index(package) - 1]).as_posix()


@cache
def part_of(path: Path) -> str:
    """The room of a file, or the file itself where it lies on the ground floor."""
    if "siirl_storage" in path.parts:
        return "siirl_storage"
    return within(path).split("/")[0].removesuffix(".py")


@cache
def imported(path: Path, *, typing: bool = True) -> tuple[tuple[int, str], ...]:
    """Line and full name of all that a file imports, anywhere in it, and of ``torch.distributed``
    used by that name; not what it imports when it is run as a script, nor, without ``typing``, for
    type checkers alone.
    """
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    nodes = parsed.nodes_of(path)
    skipped = under_ifs_on(nodes[ast.If], {"__name__"} if typing else {"__name__", "TYPE_CHECKING"})
    found = []
    for kind in (ast.Import, ast.ImportFrom, ast.Attribute):
        for node in nodes[kind]:
            if node in skipped:
                continue
            match node:
                case ast.Import(names):
                    found += [(node.lineno, alias.name) for alias in names]
                case ast.ImportFrom(source, names, level):
                    above = ".".join(module.split(".")[:-level]) if level else ""
                    origin = ".".join(filter(None, (above, source)))
                    found += [(node.lineno, f"{origin}.{alias.name}") for alias in names]
                case ast.Attribute(ast.Name("torch"), "distributed"):
                    found.append((node.lineno, "torch.distributed"))
    return tuple(sorted(found))


def under_ifs_on(statements: list[ast.If], names: set[str]) -> set[ast.AST]:
    """All nodes under an ``if`` on one of the names."""
    found: set[ast.AST] = set()
    for statement in statements:
        asked = {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)}
        if asked & names:
            found.update(ast.walk(statement))
    return found


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@cache
def target_part(name: str) -> str | None:
    """The part of LAYERS that an imported name belongs to; None for third parties and for the
    package itself.
    """
    parts = name.split(".")
    if parts[0] == "siirl_storage":
        return "siirl_storage"
    if parts[0] != "siirl_dask" or len(parts) == 1:
        return None
    exists = (ROOT / "siirl_dask" / parts[1]).is_dir() or (
        ROOT / "siirl_dask" / f"{parts[1]}.py"
    ).is_file()
    return parts[1] if exists else None


@cache
def modules() -> dict[str, Path]:
    """Every module's full name and its file."""
    roots = {"siirl_dask": ROOT, "siirl_storage": ROOT / "storage"}
    named = {
        path: path.relative_to(
            roots["siirl_storage" if "siirl_storage" in path.parts else "siirl_dask"]
        )
        for path in sources()
    }
    return {
        ".".join(name.with_suffix("").parts).removesuffix(".__init__"): path
        for path, name in named.items()
    }


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none, an empty list. Peels off what imports
    nothing that is left.
    """
    left = {module: set(targets) for module, targets in imports.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def test_every_module_is_in_a_layer():
    parts = {part_of(path) for path in sources()}
    assert parts == set(LEVEL), (
        "a module or a room that no layer names, or a layer's name that is nowhere"
    )


def test_no_modules_import_each_other_in_a_circle():
    there = modules()
    imports = {
        module: {
            name if name in there else name.rpartition(".")[0]
            for _, name in imported(path, typing=False)
        }
        & there.keys() - {module}
        for module, path in there.items()
    }
    assert sum(map(len, imports.values())) > 400
    assert circle(imports) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "d"]


def test_no_rooms_import_each_other_in_a_circle():
    imports: dict[str, set[str]] = {part: set() for part in LEVEL}
    for path in sources():
        own = part_of(path)
        targets = {target_part(name) for _, name in imported(path, typing=False)}
        imports[own] |= targets - {None, own}
    assert sum(map(len, imports.values())) > 150
    assert circle(imports) == []


def test_imports_go_up_the_layers():
    wrong = []
    for path in sources():
        part = part_of(path)
        for line, name in imported(path):
            target = target_part(name)
            if target is None or target == part or (part in GROUND and target in GROUND):
                continue
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if LEVEL[target] >= LEVEL[part]:
                wrong.append(f"{where}, but {part!r} is not below {target!r}")
            if part == "worker" and target in WORKER_SEES_NO:
                wrong.append(f"{where}, but the worker sees no {target}")
    assert not wrong, "\n".join(wrong)


def test_third_parties_stay_where_they_belong():
    wrong = []
    for path in sources():
        for line, name in imported(path):
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            wrong += [f"{where}: {fault}" for fault in misplaced(path, name)]
    assert not wrong, "\n".join(wrong)


def misplaced(path: Path, name: str) -> list[str]:
    """Return what is wrong with a file's import of a third party."""
    part = part_of(path)
    faults = []
    for package, places in ONLY_IN.items():
        is_third = is_of(name, package) and part != "siirl_storage"
        if is_third and not within(path).startswith(places):
            faults.append(f"{package} belongs in {', '.join(places)}")
    top = name.split(".")[0]
    own = top in sys.stdlib_module_names or top in ("siirl_dask", "siirl_storage")
    if part in NEEDS_ONLY and not own:
        allowed = NEEDS_ONLY[part] | ({"pytest"} if within(path) == "conformance.py" else set())
        if top not in allowed:
            faults.append(f"{part} gets by with {sorted(allowed) or 'the standard library'}")
    return faults


def test_the_planner_knows_no_config_and_no_engine():
    files = [path for path in sources() if part_of(path) == "planner"]
    assert len(files) > 20
    parts = {within(path): {target_part(name) for _, name in imported(path)} for path in files}
    known = {None, "planner", "errors", "schema", "coerce", "wording"}
    assert {name: seen - known for name, seen in parts.items() if seen - known} == {}


@pytest.mark.parametrize("module", ["siirl_dask", "siirl_dask.planner", "siirl_dask.config.file"])
def test_an_import_is_light(module):
    heavy = ("torch", "dask", "distributed", "transformers", "vllm", "sglang")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
