"""Prints the test files that a change can break: ``python tests/select_tests.py main``, or ``make
test SINCE=main``. With ``--marked slow``, those in which a test can have that mark of pytest's, the
longest first.

A change is what differs from the common ancestor with that commit, uncommitted and new files among
it. A test file is chosen where it has changed, or where it imports a changed module: anywhere in
it, through other modules, through the conftest.py of its folders, or by a name in a string such as
``"siirl_dask.nodes:score"``. Nothing is imported: the graph is read from the sources. A changed
file that is no module chooses the test files that name it, or its folder, in a string, or that
import a module which does. Files that walk a folder of sources are always chosen. EVERYTHING, and a
file that nobody names, choose all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOTS = {
    "siirl_dask": "",
    "siirl_storage": "storage",
    "tests": "",
    "benchmarks": "",
    "pipelines": "",
}
"""Top packages, and the folder that each lies in."""
EVERYTHING = ("pyproject.toml", "Makefile", "tests/conftest.py", ".ci/run")
NOWHERE = (".gitignore", "LICENSE")
WALKS = ("rglob", "walk_packages", "iter_modules", "files_below")
"""Calls of a test that looks at whatever lies in a folder; the last is of tests/parsed.py."""
ROOTS_OF_CODE = ("siirl_dask", "storage", "tests")
LOADED = " loaded"
LONGEST = ("hosts", "training", "benchmarks", "e2e", "rollout")
"""Folders of the longest files of slow tests, so that none of them is begun last."""
MENTIONED = re.compile(rf"\b(?:{'|'.join(ROOTS)})(?:\.\w+)+")


class SelectError(Exception):
    """No change can be found; the message says why, in a line."""


@dataclass
class Source:
    """Names of other files in a file, without those for type checkers alone."""

    loads: set[str] = field(default_factory=set)
    """Names that it imports whenever it is imported itself: modules, or what is in them."""
    uses: set[str] = field(default_factory=set)
    """Names that its functions import, or that its strings hold."""
    text: str = ""
    """All its strings but docstrings."""
    words: set[str] = field(default_factory=set)
    """Names of its functions' arguments, and the words of its strings: fixtures are among them."""
    walks: bool = False
    marks: set[str] = field(default_factory=set)
    """Marks of pytest that it names."""
    fixtures: dict[str, Source] = field(default_factory=dict)
    """Functions of a conftest.py, which act on those files alone that name them."""


def main(arguments: list[str]) -> int:
    """Print the chosen files on standard output, and why on standard error. Return 2 where there
    is no such commit.
    """
    root = Path(__file__).resolve().parents[1]
    if len(arguments) == 2 and arguments[0] == "--marked":
        sources = {path: read(path, (root / path).read_bytes()) for path in python_files(root)}
        print("\n".join(marked(arguments[1], sources)))
        return 0
    if len(arguments) != 1:
        print("usage: python tests/select_tests.py COMMIT, or --marked MARK", file=sys.stderr)
        return 2
    try:
        changed = changed_files(root, arguments[0])
    except SelectError as error:
        print(f"SINCE={arguments[0]}: {error}", file=sys.stderr)
        return 2
    sources = {path: read(path, (root / path).read_bytes()) for path in python_files(root)}
    chosen = select(changed, sources)
    total = sum(map(is_test, sources))
    print(
        f"SINCE={arguments[0]}: {len(changed)} files changed, {len(chosen)} of {total} test files "
        "run",
        file=sys.stderr,
    )
    for reason in dict.fromkeys(chosen.values()):
        count = sum(why == reason for why in chosen.values())
        print(f"{count:6} {reason}", file=sys.stderr)
    print("\n".join(chosen))
    return 0


def changed_files(root: Path, commit: str) -> list[str]:
    """Return the paths that differ from the common ancestor with ``commit``, and those that git
    does not know.
    """
    _git(root, "rev-parse", "--git-dir", error="not a checkout of git: run make test without SINCE")
    _git(
        root,
        "rev-parse",
        "--verify",
        "--quiet",
        f"{commit}^{{commit}}",
        error="git knows no such commit or branch",
    )
    ancestor = _git(
        root,
        "merge-base",
        commit,
        "HEAD",
        error="it has no common ancestor with what is checked out",
    )
    different = _git(root, "diff", "--name-only", "--no-renames", "-z", ancestor.strip())
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({path for path in f"{different}{new}".split("\0") if path})


def _git(root: Path, *arguments: str, error: str = "") -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        raise SelectError("the program git is not on PATH") from None
    if done.returncode != 0:
        raise SelectError(error or " ".join(done.stderr.split()))
    return done.stdout


def python_files(root: Path) -> list[str]:
    """Return the Python files below the top packages, from the root."""
    tops = [root / folder / package for package, folder in ROOTS.items()]
    return sorted(path.relative_to(root).as_posix() for top in tops for path in top.rglob("*.py"))


def is_test(path: str) -> bool:
    """Return whether pytest collects a file."""
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_")


def module_name(path: str) -> str:
    """Return the name that a file is imported by."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[0] == "storage":
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def read(path: str, code: str | bytes) -> Source:
    """Return what a file says of others."""
    tree = ast.parse(code)
    above = module_name(path).split(".")
    if PurePosixPath(path).name == "__init__.py":
        above.append("__init__")
    source = Source()
    if PurePosixPath(path).name != "conftest.py":
        _read_into(source, tree, above)
        return source
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and "autouse=True" not in map(
            ast.unparse, _keywords(statement)
        ):
            source.fixtures[statement.name] = Source()
            _read_into(source.fixtures[statement.name], statement, above)
        else:
            _read_into(source, statement, above)
    return source


def _keywords(function: ast.FunctionDef) -> Iterator[ast.keyword]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call):
            yield from decorator.keywords


def _read_into(source: Source, tree: ast.AST, above: list[str]) -> None:
    docstrings = set()
    for node, later in _executed(tree):
        names = source.uses if later else source.loads
        match node:
            case ast.Import(imported):
                names.update(alias.name for alias in imported)
            case ast.ImportFrom(module, imported, level):
                origin = [*above[:-level], module] if level else [module]
                names.update(".".join(filter(None, [*origin, alias.name])) for alias in imported)
            case ast.Expr(ast.Constant(str()) as constant):
                docstrings.add(id(constant))
            case ast.Constant(str(text)) if id(node) not in docstrings:
                source.text += f"{text}\n"
                source.uses.update(MENTIONED.findall(text))
                source.words.update(re.findall(r"\w+", text))
            case ast.arg(name):
                source.words.add(name)
            case ast.Attribute(ast.Attribute(attr="mark"), name):
                source.marks.add(name)
            case ast.Attribute(attr=name) if name in WALKS:
                source.walks = True


def _executed(tree: ast.AST, later: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of a file, each before those in it, and whether a function has to be called
    first; without what stands under ``if TYPE_CHECKING``.
    """
    if (
        isinstance(tree, ast.If)
        and isinstance(tree.test, ast.Name)
        and tree.test.id == "TYPE_CHECKING"
    ):
        for child in tree.orelse:
            yield from _executed(child, later)
        return
    yield tree, later
    later = later or isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(tree):
        yield from _executed(child, later)


def graph_of(sources: Mapping[str, Source], gone: Iterable[str] = ()) -> dict[str, set[str]]:
    """Return for each part of a file the parts that it leads to. A path stands for all that a file
    does; with LOADED, for what is done when it is imported; with a fixture's name, for that
    fixture. ``gone``: files that no longer exist, and may be imported still.
    """
    paths = {module_name(path): path for path in (*gone, *sources)}
    graph: dict[str, set[str]] = {path: {path + LOADED} for path in paths.values()}
    for path, source in sources.items():
        folders = [
            f"{folder}/conftest.py"
            for folder in PurePosixPath(path).parents
            if path.startswith("tests/")
        ]
        conftests = [file for file in folders if file in sources]
        graph[path + LOADED] = _loaded_by(source.loads, paths) | {
            file + LOADED for file in conftests
        }
        graph[path] |= _used_by(source.loads | source.uses, paths)
        graph[path] |= _fixtures_of(source, conftests, sources)
        for name, fixture in source.fixtures.items():
            graph[f"{path}::{name}"] = {path + LOADED} | _used_by(
                fixture.loads | fixture.uses, paths
            )
            graph[f"{path}::{name}"] |= _fixtures_of(fixture, conftests, sources)
    return graph


def _fixtures_of(user: Source, conftests: list[str], sources: Mapping[str, Source]) -> set[str]:
    return {
        f"{file}::{name}"
        for file in conftests
        for name in sources[file].fixtures
        if name in user.words
    }


def _loaded_by(names: set[str], paths: Mapping[str, str]) -> set[str]:
    """Return what is imported for the sake of these names: a module, and the packages that it
    lies in.
    """
    loaded = set()
    for name in names:
        parts = name.split(".")
        loaded.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return {paths[name] + LOADED for name in loaded if name in paths}


def _used_by(names: set[str], paths: Mapping[str, str]) -> set[str]:
    """Return what is imported for the sake of these names, and the modules that they are in,
    whose code may be run.
    """
    used = _loaded_by(names, paths)
    for name in names:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        if name:
            used.add(paths[name])
    return used


def reaching(graph: Mapping[str, set[str]], targets: Iterable[str]) -> dict[str, int]:
    """Return the targets and all from which a path leads to one of them, with the length of the
    shortest.
    """
    users: dict[str, set[str]] = {}
    for path, used in graph.items():
        for target in used:
            users.setdefault(target, set()).add(path)
    distances = dict.fromkeys(targets, 0)
    waiting = deque(distances)
    while waiting:
        path = waiting.popleft()
        for user in users.get(path, set()) - distances.keys():
            distances[user] = distances[path] + 1
            waiting.append(user)
    return distances


def select(changed: Iterable[str], sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the test files to run and why, in the order in which to run them: those that have
    changed, then those from which the fewest imports lead to what has changed.
    """
    tests = [path for path in sources if is_test(path)]
    changed = [path for path in changed if path not in NOWHERE]
    for path in changed:
        if path in EVERYTHING:
            return dict.fromkeys(tests, f"all, for {path} has changed")
    graph = graph_of(
        sources, gone=[path for path in changed if path.endswith(".py") and path not in sources]
    )
    importing: dict[str, int] = {}
    naming: dict[str, int] = {}
    for path in changed:
        users = reaching(graph, [path, path + LOADED])
        importing = _nearest(importing, users)
        if is_test(path) or users.keys() - {path, path + LOADED}:
            continue
        named_in = _naming(path, sources)
        if not named_in and not path.endswith((".md", ".py")):
            return dict.fromkeys(
                tests, f"all, for no test imports or names {path}, which has changed"
            )
        naming = _nearest(naming, reaching(graph, named_in))
    walking = dict.fromkeys([path for path in tests if changed and sources[path].walks], 0)
    kinds = {
        "have changed": dict.fromkeys(changed, 0),
        "import what has changed": importing,
        "name what has changed in a string": naming,
        "look at all that lies in a folder": walking,
    }
    reasons: dict[str, str] = {}
    for reason, distances in kinds.items():
        for path in sorted(set(tests) & distances.keys(), key=lambda test: (distances[test], test)):
            reasons.setdefault(path, reason)
    return reasons


def marked(mark: str, sources: Mapping[str, Source]) -> list[str]:
    """Return the test files that can have a test with this mark, those that name it and those that
    import what names it, in the order of LONGEST.
    """
    naming = [path + LOADED for path, source in sources.items() if mark in source.marks]
    reached = reaching(graph_of(sources), naming)
    found = [path for path in sources if is_test(path) and path + LOADED in reached]
    folders = {path: PurePosixPath(path).parts[1] for path in found}
    return sorted(
        found,
        key=lambda path: LONGEST.index(folders[path]) if folders[path] in LONGEST else len(LONGEST),
    )


def _nearest(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {path: min(part[path] for part in (one, other) if path in part) for path in one | other}


def _naming(path: str, sources: Mapping[str, Source]) -> set[str]:
    """Return the parts of files whose strings hold a file's name; where none does, its folder's
    name, and so on. The package names pages of docs/ in its errors, and does not read them.
    """
    parts = dict(sources)
    if path.endswith(".md"):
        parts = {name: source for name, source in parts.items() if name.startswith("tests/")}
    texts = {name: source.text for name, source in parts.items()}
    for name, source in parts.items():
        texts |= {f"{name}::{fixture}": part.text for fixture, part in source.fixtures.items()}
    for name in reversed(PurePosixPath(path).parts):
        if name in ROOTS_OF_CODE:
            break
        pattern = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
        found = {part for part, text in texts.items() if pattern.search(text)}
        if found:
            return found
    return set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
