"""The wheel and the source distribution have all that their users need: configs, scripts, docs, tests."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PARTS = ("benchmarks", "configs", "docs", "pipelines", "siirl_dask", "storage", "tests")
FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml")
UNBUILT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*_cache")
BUILD = (
    "import sys; folder = sys.argv[1]; from setuptools import build_meta; "
    "build_meta.build_sdist(folder); build_meta.build_wheel(folder)"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source distribution and the wheel, built of a copy."""
    copy = tmp_path_factory.mktemp("copy")
    folder = tmp_path_factory.mktemp("built")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=UNBUILT)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def there(part, below=""):
    """The files of a folder of this repository, by their paths below it."""
    folder = ROOT / part
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        f"{below}{path.relative_to(folder).as_posix()}"
        for path in files
        if not {"__pycache__", ".ruff_cache", ".mypy_cache"} & {*path.parts}
    }


def test_the_wheel_has_every_config_and_every_script_of_pipelines(wheel):
    names = set(wheel.namelist())
    assert there("configs", "siirl_dask/configs/") <= names
    assert there("pipelines", "siirl_dask/examples/") <= names
    assert {"siirl_dask/py.typed", "siirl_dask/__main__.py"} <= names


def test_the_wheel_has_the_packages_and_nothing_else(wheel):
    tops = {PurePosixPath(name).parts[0] for name in wheel.namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        "siirl_dask",
        "siirl_storage",
    }


def test_the_source_distribution_has_docs_scripts_and_whole_tests(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "README.md", "Makefile", "LICENSE"} <= names
    for part in ("configs", "docs", "pipelines", "tests", "benchmarks"):
        assert there(part, f"{part}/") <= names


def test_the_description_of_the_package_has_no_link_that_is_dead_elsewhere(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = HeaderParser().parsestr(wheel.read(name).decode())
    text = str(metadata.get_payload())
    assert "siirl-dask quickstart" in text
    assert text.count("](") == text.count("](https://")
    versions = [text for text in metadata.get_all("Classifier") if "Python :: 3." in text]
    assert [text.rpartition(" ")[2] for text in versions] == ["3.11", "3.12", "3.13"]
    pythons = SpecifierSet(metadata["Requires-Python"])
    known = ["3.10.14", "3.11.0", "3.11.7", "3.12.0", "3.12.1", "3.12.2", "3.12.13", "3.13.0"]
    # these two call methods of other types (gh-89811 of CPython)
    assert [each for each in known if each not in pythons] == ["3.10.14", "3.12.0", "3.12.1"]


def test_a_script_of_the_package_is_a_module():
    command = [sys.executable, "-m", "siirl_dask.examples.grpo", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "siirl_dask:NAME" in done.stdout
