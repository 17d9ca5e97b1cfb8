"""Environments of other packages by their own names, ``gymnasium:FrozenLake-v1?is_slippery=false``:
the package, what it calls the environment, and options.

An adapter is a module that is imported when its package is named, and nothing else knows it. It has
``environment(name)``, which returns a class of environments with its options bound, and
``rows(name, seed)``, which yields the rows of a dataset to play or to answer.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, Protocol, cast
from urllib.parse import unquote

from siirl_dask.errors import PlanError, did_you_mean

_ADAPTERS = "siirl_dask.environments.ecosystems"
ECOSYSTEMS: Mapping[str, str] = MappingProxyType(
    {
        "gymnasium": f"{_ADAPTERS}.gymnasium_tasks",
        "nemo_gym": f"{_ADAPTERS}.nemo_gym_tasks",
        "openenv": f"{_ADAPTERS}.openenv_servers",
        "reasoning_gym": f"{_ADAPTERS}.reasoning_tasks",
        "textarena": f"{_ADAPTERS}.textarena_games",
        "verifiers": f"{_ADAPTERS}.verifiers_environments",
    }
)
"""Modules of adapters, by the name of the package as one imports it."""
BEHIND_SERVERS = frozenset({"nemo_gym", "openenv"})
"""Packages whose environments are reached over HTTP: they need not be installed here."""
_NAME = re.compile(r"(?P<package>[\w-]+):(?P<id>[^?/\\:][^?\\:]*)(\?(?P<options>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EcosystemName:
    """The name of another package's environment."""

    spelled: str
    """The name as it was given."""
    package: str
    id: str
    """Name that the package has for the environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options: those that the adapter knows, and the environment's own. A value is JSON, or else
    a text."""


class EcosystemAdapter(Protocol):
    """A module of ``ECOSYSTEMS``."""

    ROWS: int | None
    """Rows of a dataset whose name does not say how many; None: all that the package has."""

    def environment(self, name: EcosystemName) -> Callable[..., Any]:
        """Return a class of environments with its options bound. PlanError for a name or options
        that the package does not know.
        """
        ...

    def rows(self, name: EcosystemName, seed: int) -> Iterator[Mapping[str, Any]]:
        """Yield rows, the first of ``seed``, each with a ``prompt``, a text or messages, and other
        columns of texts and whole numbers. PlanError as by ``environment``.
        """
        ...


def names_package(text: str) -> bool:
    """Return whether a text begins as the name of another package's environment does."""
    package, colon, _ = text.partition(":")
    return package.strip().replace("-", "_") in ECOSYSTEMS if colon else False


def ecosystem_name(text: str) -> EcosystemName | None:
    """Return the parts of a name of another package's environment; None for a text that is no
    such name. PlanError for an option without a value, or one that is given twice.
    """
    match = _NAME.fullmatch(text)
    if match is None or (package := match["package"].replace("-", "_")) not in ECOSYSTEMS:
        return None
    options: dict[str, Any] = {}
    query = ""
    if match["options"] is not None:
        query = match["options"]
    for part in filter(None, query.split("&")):
        key, sign, value = part.partition("=")
        if not (key and sign) or key in options:
            raise PlanError(
                f"{text!r}: expected different options with values, as in "
                f"{package}:{match['id']}?size=3&seed=7"
            )
        options[key] = _value(unquote(value))
    return EcosystemName(text, package, match["id"], options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def adapter_of(name: EcosystemName) -> EcosystemAdapter:
    """Return the adapter of a name's package. PlanError where the package is not installed."""
    _package(name)
    return cast(EcosystemAdapter, importlib.import_module(ECOSYSTEMS[name.package]))


def environment_named(text: str) -> Callable[..., Any] | None:
    """Return the environments that ``text`` names, a class with its options bound; None for a text
    that names none. A function of the package itself, such as ``gymnasium:make``, is none.
    """
    name = ecosystem_name(text)
    if name is None:
        return None
    package = _package(name)
    if package is not None and callable(vars(package).get(text.partition(":")[2])):
        return None
    return adapter_of(name).environment(name)


def _package(name: EcosystemName) -> ModuleType | None:
    """Return a name's package; None where its environments are behind servers. PlanError where it
    is not installed.
    """
    if name.package in BEHIND_SERVERS:
        return None
    try:
        return importlib.import_module(name.package)
    except ModuleNotFoundError as error:
        extra = name.package.replace("_", "-")
        raise PlanError(
            f"{name.spelled!r}: {error.name} is not installed here: pip install "
            f"'siirl_dask[{extra}]'"
        ) from error


def unknown_id(name: EcosystemName, known: Mapping[str, Any]) -> PlanError:
    """Return the error for an environment that the package does not have."""
    return PlanError(
        f"{name.spelled!r}: {name.package} has no {name.id!r} among its {len(known)}"
        f"{did_you_mean(name.id, known)}"
    )
