"""Makes ``.gpu/``: the scripts of a first day on a GPU, and the wheels that such a machine lacks.

    make gpu-bundle

The machine has Python 3.12, torch, transformers and what else ``there.txt`` lists, and no network.
Wheels are those of this package's dependencies, of liger-kernel and of TRL, and of what these need
in turn, without what is there. Carry the repository with ``.gpu`` to the machine, and run
``OUT=folder bash .gpu/first_run.sh`` in the repository's root.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / ".gpu"
PYTHON = "3.12"
SCRIPTS = (
    "first_run.sh",
    "first_run.py",
    "parts.py",
    "processes.py",
    "results.py",
    "probe.py",
    "figures.py",
    "setting.py",
    "training_figures.py",
    "generation_figures.py",
    "trl_steps.py",
)
"""The machine runs these. The page is made where its results are brought."""
LEFT_OUT = {"duckdb"}
"""It answers questions to a run that has ended, and is two thirds of the bundle; nothing of the
day imports it."""
OF_EXTRAS = {"liger": "liger-kernel", "bench": "trl"}
"""Packages that the day measures as well, each with the extra that bounds its version."""
MANYLINUX = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2014", "1")
ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "os_name": "posix",
    "extra": "",
}
"""The machine that the wheels are for, as markers of requirements name it."""
Download = Callable[[Requirement], Path]


def packages_there(text: str) -> set[str]:
    """Names in ``there.txt``, one a line."""
    lines = [line.strip() for line in text.splitlines()]
    return {canonicalize_name(line) for line in lines if line and not line.startswith("#")}


def wanted(pyproject: Mapping[str, object], there: set[str]) -> list[Requirement]:
    """Return what to begin with: dependencies of the project and of what the day measures,
    without what is there.
    """
    project = pyproject["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    for extra, name in OF_EXTRAS.items():
        (text,) = [
            each
            for each in project["optional-dependencies"][extra]
            if Requirement(each).name == name
        ]
        found.append(Requirement(text))
    return [each for each in found if is_missing(each, there)]


def is_missing(requirement: Requirement, there: set[str]) -> bool:
    """Whether the machine needs the package and does not have it."""
    if requirement.marker is not None and not requirement.marker.evaluate(ENVIRONMENT):
        return False
    return canonicalize_name(requirement.name) not in there | LEFT_OUT


def needed_by(wheel: Path) -> Iterator[Requirement]:
    """The requirements of a wheel, as its metadata has them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [
            each
            for each in archive.namelist()
            if each.endswith(".dist-info/METADATA") and each.count("/") == 1
        ]
        headers = HeaderParser().parsestr(archive.read(name).decode())
    for text in headers.get_all("Requires-Dist", []):
        yield Requirement(text)


def gather(first: Sequence[Requirement], there: set[str], download: Download) -> dict[str, Path]:
    """Download wheels until nothing is missing that one of them needs; the wheel of each name.

    ValueError where a wheel needs another version of a package than was downloaded for one before.
    """
    wheels: dict[str, Path] = {}
    open_requirements = list(first)
    while open_requirements:
        requirement = open_requirements.pop(0)
        name = canonicalize_name(requirement.name)
        if name not in wheels:
            wheels[name] = download(requirement)
            open_requirements += [
                each for each in needed_by(wheels[name]) if is_missing(each, there)
            ]
        version = parse_wheel_filename(wheels[name].name)[1]
        if not requirement.specifier.contains(version, prereleases=True):
            raise ValueError(
                f"{requirement} is needed, and {wheels[name].name} was downloaded before: bound it "
                "tighter"
            )
    return wheels


def pip_download(folder: Path, requirement: Requirement) -> Path:
    """Download a wheel of the requirement for the machine, without what it needs in turn.

    RuntimeError, with pip's words, where there is none.
    """
    plain = Requirement(str(requirement))
    plain.marker = None
    before = set(folder.glob("*.whl"))
    platforms = [
        f"--platform=manylinux{'' if tag in ('1', '2014') else '_'}{tag}_x86_64"
        for tag in MANYLINUX
    ]
    target = [
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
        "--implementation=cp",
        *platforms,
    ]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, *target, str(plain)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"no wheel of {plain} was downloaded:\n{done.stderr.strip()}")
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def commit_of(root: Path) -> str:
    """The commit that the bundle is of, since the machine may have no git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def make_bundle(folder: Path, download: Download) -> list[Path]:
    """Write scripts and wheels to the folder, which is made anew; the wheels, largest first."""
    there = packages_there((HERE / "there.txt").read_text())
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels = gather(wanted(pyproject, there), there, download)
    for name in SCRIPTS:
        shutil.copy(HERE / name, folder / name)
    (folder / "commit.txt").write_text(commit_of(ROOT) + "\n")
    return sorted(wheels.values(), key=lambda wheel: -wheel.stat().st_size)


def main() -> None:
    if OUT.exists():
        shutil.rmtree(OUT)
    wheel_folder = OUT / "wheels"
    wheel_folder.mkdir(parents=True)
    wheels = make_bundle(OUT, lambda requirement: pip_download(wheel_folder, requirement))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{total / 1e6:6.1f} MB in {OUT}; on the machine: OUT=folder bash .gpu/first_run.sh")


if __name__ == "__main__":
    main()
