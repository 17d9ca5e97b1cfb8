"""``make test SINCE=...`` runs every test file that a change can break; on import graphs, it and
nothing else.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.select_tests import EVERYTHING, marked, read, select

ROOT = Path(__file__).parents[1]
MODULES = 6
TESTS = 4


@st.composite
def repositories(draw):
    """Modules and tests that import modules in any way, and for each file the files that it
    imports.
    """
    names = [f"siirl_dask/room{number % 2}/m{number}.py" for number in range(MODULES)]
    tests = [f"tests/room/test_t{number}.py" for number in range(TESTS)]
    imports = {
        path: draw(st.sets(st.sampled_from(names), max_size=2)) - {path}
        for path in [*names, *tests]
    }
    spellings = (
        "from {package} import {name}",
        "from {package}.{name} import anything",
        "import {package}.{name}",
        "def later():\n    from {package} import {name}",
        "where = '{package}.{name}:anything'",
    )
    sources = {}
    for path, targets in imports.items():
        lines = []
        for target in sorted(targets):
            package, _, name = target.removesuffix(".py").replace("/", ".").rpartition(".")
            lines.append(draw(st.sampled_from(spellings)).format(package=package, name=name))
        sources[path] = read(path, "\n".join(lines))
    return sources, imports


def closure(imports):
    """Files that each file reaches: Warshall's algorithm, over all pairs."""
    reached = {path: {path, *targets} for path, targets in imports.items()}
    for middle in imports:
        for path in imports:
            if middle in reached[path]:
                reached[path] |= reached[middle]
    return reached


@given(repository=repositories(), data=st.data())
def test_what_reaches_a_changed_file_is_chosen_and_nothing_else(repository, data):
    sources, imports = repository
    changed = data.draw(st.sets(st.sampled_from(sorted(sources)), max_size=3))
    reached = closure(imports)
    expected = {path for path in sources if path.startswith("tests/") and reached[path] & changed}
    chosen = select(sorted(changed), sources)
    assert chosen.keys() == expected
    first = list(chosen)[: len(changed & expected)]
    assert set(first) == changed & expected, "the changed files do not run first"


def test_a_mark_is_in_the_files_that_name_it_and_in_those_that_import_what_names_it_the_longest_first():
    files = {
        "siirl_dask/testing/suite.py": "PARAMETERS = [pytest.param(1, marks=pytest.mark.slow)]",
        "tests/rewards/kinds.py": "SLOW = pytest.mark.slow",
        "tests/rewards/test_imports.py": "from tests.rewards.kinds import SLOW",
        "tests/rewards/test_other_mark.py": "@pytest.mark.alone\ndef test(slow): return slow.mark",
        "tests/rewards/test_none.py": "def test():\n    from tests.rewards.kinds import SLOW",
        "tests/e2e/test_inherits.py": "from siirl_dask.testing.suite import Suite",
        "tests/e2e/test_through.py": "from tests.e2e.test_inherits import anything",
        "tests/hosts/test_all.py": "pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]",
    }
    found = marked("slow", {path: read(path, code) for path, code in files.items()})
    assert found == [f"tests/{name}.py" for name in (
        "hosts/test_all", "e2e/test_inherits", "e2e/test_through", "rewards/test_imports",
    )]  # fmt: skip


def test_the_files_nearest_to_the_change_run_first():
    files = {f"siirl_dask/m{n}.py": f"import siirl_dask.m{n - 1}" for n in range(1, 5)} | {
        "siirl_dask/m0.py": ""
    }
    files |= {f"tests/test_{9 - n}.py": f"from siirl_dask.m{n} import anything" for n in range(5)}
    sources = {path: read(path, code) for path, code in files.items()}
    assert list(select(["siirl_dask/m0.py"], sources)) == [
        f"tests/test_{9 - n}.py" for n in range(5)
    ]


def chosen_among(files, *changed):
    sources = {path: read(path, code) for path, code in files.items()}
    return set(select(changed, sources))


FILES = {
    "siirl_dask/__init__.py": "PUBLISHED = 'siirl_dask.far'",
    "siirl_dask/near.py": "",
    "siirl_dask/far.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from siirl_dask.near import N",
    "tests/conftest.py": "import pytest\n@pytest.fixture\ndef far():\n    import siirl_dask.far\n    name = 'run.yaml'",
    "tests/test_near.py": "from siirl_dask import near",
    "tests/test_far.py": "def test_it(far): ...",
    "tests/test_pages.py": "for page in folder.rglob('*.md'): ...",
    "tests/test_pipeline.py": "run('pipelines/grpo.py')",
    "tests/room/conftest.py": "import siirl_dask.near",
    "tests/room/test_room.py": "",
    "tests/room/deeper/test_deeper.py": "",
}
WALKERS = {"tests/test_pages.py"}
EVERY_TEST = {path for path in FILES if path.rpartition("/")[2].startswith("test_")}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            "siirl_dask/far.py",
            {"tests/test_far.py"},
        ),  # the package's first file names it, and is imported by all
        (
            "siirl_dask/near.py",
            {"tests/test_near.py", "tests/room/test_room.py", "tests/room/deeper/test_deeper.py"},
        ),
        ("siirl_dask/run.yaml", {"tests/test_far.py"}),
        ("pipelines/grpo.py", {"tests/test_pipeline.py"}),
        ("docs/runs.md", set()),
        ("tests/room/conftest.py", {"tests/room/test_room.py", "tests/room/deeper/test_deeper.py"}),
        ("siirl_dask/nobody_names_it.json", EVERY_TEST),
        *((path, EVERY_TEST) for path in EVERYTHING),
        ("LICENSE", None),
    ],
)
def test_each_kind_of_file_chooses_the_tests_that_depend_on_it(changed, expected):
    assert chosen_among(FILES, changed) == (set() if expected is None else expected | WALKERS)


def test_a_module_that_is_gone_chooses_the_tests_that_import_it_still():
    files = {path: code for path, code in FILES.items() if path != "siirl_dask/near.py"}
    assert "tests/test_near.py" in chosen_among(files, "siirl_dask/near.py")


def git(folder, *arguments):
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """A repository with FILES, the Makefile, and programs that write down how they are called."""
    copied = ("Makefile", "tests/select_tests.py")
    for path, code in (
        FILES | dict.fromkeys(copied, "") | {".gitignore": "build/\nbin/\ncalls\n"}
    ).items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    for path in copied:
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "bin").mkdir()
    for name in ("ruff", "mypy", "pytest"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> calls\nexit "${{PYTEST_SAYS:-0}}"\n')
        if name != "pytest":
            program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    git(tmp_path, "init", "--initial-branch=main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message=first")
    return tmp_path


def make(folder, *arguments, pytest_says=0):
    """Run make without an installation; return what it did, and the arguments of each pytest."""
    command = ["make", "--old-file=install", "BIN=bin", *arguments]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTEST_SAYS": str(pytest_says)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done, lines


def files_in(line):
    return [word for word in line.split() if word.endswith(".py")]


def test_make_runs_changed_files_first_and_those_of_uncommitted_changes(checkout):
    (checkout / "siirl_dask" / "near.py").write_text("changed = True")
    (checkout / "tests" / "test_new.py").write_text("pytest.mark.alone")
    done, calls = make(checkout, "test", "SINCE=main")
    assert done.returncode == 0, done.stderr
    assert files_in(calls[0])[0] == "tests/test_new.py"
    assert {"tests/test_near.py", "tests/room/test_room.py"} <= set(files_in(calls[0]))
    assert "tests/test_far.py" not in calls[0]
    assert files_in(calls[1]) == ["tests/test_new.py"]
    assert "2 files changed, 5 of 7 test files run" in done.stderr


def test_make_runs_no_test_where_nothing_has_changed_and_all_without_since(checkout):
    done, calls = make(checkout, "test", "SINCE=HEAD")
    assert (done.returncode, calls) == (0, []), done.stderr
    done, calls = make(checkout, "test")
    assert done.returncode == 0, done.stderr
    assert calls[0].endswith(" tests")


@pytest.mark.parametrize(
    ("says", "since", "fails"), [(1, True, True), (5, True, False), (5, False, True)]
)
def test_make_fails_with_pytest_but_where_the_chosen_files_hold_no_test_of_this_circle(
    checkout, says, since, fails
):
    (checkout / "siirl_dask" / "near.py").write_text("changed = True")
    done, _ = make(checkout, "test", *(["SINCE=main"] if since else []), pytest_says=says)
    assert (done.returncode != 0) == fails


def test_make_check_takes_the_chosen_files_too(checkout):
    (checkout / "siirl_dask" / "far.py").write_text("changed = True")
    done, calls = make(checkout, "check", "SINCE=main")
    assert done.returncode == 0, done.stderr
    assert "--no-processes" in calls[0]
    assert files_in(calls[0]) == ["tests/test_far.py", "tests/test_pages.py"]
    assert len(calls) == 1


def test_an_unknown_commit_is_one_line_and_no_test_runs(checkout):
    done, calls = make(checkout, "test", "SINCE=nowhere")
    assert done.returncode == 2
    assert calls == []
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert lines == ["SINCE=nowhere: git knows no such commit or branch"]


def test_a_folder_that_is_no_checkout_is_one_line(checkout):
    shutil.rmtree(checkout / ".git")
    done = subprocess.run(
        [sys.executable, "tests/select_tests.py", "main"],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "SINCE=main: not a checkout of git: run make test without SINCE\n"
