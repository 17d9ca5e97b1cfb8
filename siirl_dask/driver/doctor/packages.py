"""Compares Python and the installed packages with what pyproject.toml asks for."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import siirl_dask
from siirl_dask.driver.doctor.finding import DoctorFinding, fault, ok
from siirl_dask.errors import ConfigError

_SHOWN = ("torch", "transformers", "dask", "distributed", "pyarrow", "fsspec")
_NOT_FOR_RUNS = ("bench", "test")  # extras of developers
_REFUSED_IF_OLDER = ("torch", "transformers")


def check_packages() -> list[DoctorFinding]:
    """Return findings on Python, on every package that is needed, and on those of extras that
    are installed.
    """
    project = _project()
    findings = [_python(project.requires_python)]
    judged = [_judge(needed, required=True) for needed in project.needed]
    judged += [
        _judge(needed, required=False)
        for extra, needed in project.optional
        if extra not in _NOT_FOR_RUNS
    ]
    wrong = [finding for finding in judged if finding is not None]
    if wrong:
        return [*findings, *wrong]
    shown = ", ".join(f"{name} {version(name)}" for name in _SHOWN)
    return [*findings, ok("packages", f"all {len(project.needed)} as siirl_dask asks: {shown}")]


def refuse_older() -> None:
    """Raise ConfigError where torch or transformers is older than this package asks for: it would
    end the run later.

    A newer one passes: what it lacks, if anything, is not known. The doctor names both.
    """
    for needed in _project().needed:
        if needed.name not in _REFUSED_IF_OLDER:
            continue
        found = version(needed.name)
        if found is None:
            continue
        least = SpecifierSet(
            ",".join(str(each) for each in needed.specifier if each.operator == ">=")
        )
        if not least.contains(found, prereleases=True):
            raise ConfigError(
                f"{needed.name} {found} is installed in {sys.prefix}, and siirl_dask needs "
                f"{_wanted(needed)}: {_install(needed)}"
            )


def install_command(name: str) -> str:
    """Return the command that installs a package that this one needs, of a version that it
    needs.
    """
    return _install(next(needed for needed in _project().needed if needed.name == name))


def version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class _Project:
    """The requirements of this package: from pyproject.toml beside it, or as it was installed."""

    def __init__(
        self,
        requires_python: str,
        needed: list[str],
        optional: dict[str, list[str]],
    ) -> None:
        self.requires_python = SpecifierSet(requires_python)
        self.needed = [
            each
            for each in map(Requirement, needed)
            if each.marker is None or each.marker.evaluate()
        ]
        self._optional = optional

    @property
    def optional(self) -> Iterator[tuple[str, Requirement]]:
        """The requirements of each extra, as pairs of extra and requirement."""
        for extra, requirements in self._optional.items():
            for requirement in requirements:
                yield extra, Requirement(requirement)


def _project() -> _Project:
    file = Path(siirl_dask.__file__).parents[1] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text())["project"]
        if project["name"] == "siirl_dask":
            return _Project(
                project["requires-python"],
                project["dependencies"],
                project["optional-dependencies"],
            )
    installed = metadata.distribution("siirl_dask")
    needed: list[str] = []
    optional: dict[str, list[str]] = {
        extra: [] for extra in installed.metadata.get_all("Provides-Extra") or ()
    }
    for text in installed.requires or ():
        marker = Requirement(text).marker
        extras = [
            extra for extra in optional if marker is not None and marker.evaluate({"extra": extra})
        ]
        if extras and marker is not None and not marker.evaluate({"extra": ""}):
            optional[extras[0]].append(text.partition(";")[0])
        else:
            needed.append(text)
    return _Project(installed.metadata["Requires-Python"], needed, optional)


def _python(wanted: SpecifierSet) -> DoctorFinding:
    here = ".".join(map(str, sys.version_info[:3]))
    if wanted.contains(here, prereleases=True):
        return ok("python", f"{here} in {sys.prefix}")
    return fault(
        "python", f"{here}, and siirl_dask needs {wanted}", "make PYTHON=python3.11 install"
    )


def _judge(needed: Requirement, *, required: bool) -> DoctorFinding | None:
    """Return a fault for a package that is not as it should be; None for one that is, or need
    not be there.
    """
    found = version(needed.name)
    if found is None and not required:
        return None
    if found is None:
        return fault(
            needed.name,
            f"it is not installed, and siirl_dask needs {_wanted(needed)}",
            _install(needed),
        )
    if needed.specifier.contains(found, prereleases=True):
        return None
    return fault(
        needed.name,
        f"{found} is installed, and siirl_dask needs {_wanted(needed)}",
        _install(needed),
    )


def _wanted(needed: Requirement) -> str:
    return f"{needed.name}{needed.specifier}"


def _install(needed: Requirement) -> str:
    return f"pip install '{_wanted(needed)}'"
