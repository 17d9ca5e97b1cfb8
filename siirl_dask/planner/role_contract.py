"""Declarations of a role's builder (``@builds``): how it is checked, and what it costs, before a
run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from siirl_dask.planner.contract import bare, options_of
from siirl_dask.planner.footprint import Footprint

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCost:
    """A role's memory on each of its workers and its capabilities, as far as known before it is
    built.
    """

    memory: int | None = None
    """Bytes on a CPU; None if unknown, such as for a model whose files are not on this machine."""
    computing: int = 0
    """Bytes on a CPU besides, while it computes: activations. Roles of a worker compute one
    after the other."""
    device: Footprint | None = None
    """The same where the worker has an accelerator; None if unknown."""
    checkpoint_copy: int = 0
    """Bytes of the copy that is held while a checkpoint is written."""
    provides: frozenset[str] = frozenset()
    """Capabilities that nodes may ask for with ``@columns(requires=...)``, such as ``adapters``."""
    together: str = ""
    """Roles with the same text hold together what it says: they are on the same workers, each of
    which has it once."""
    process: str = ""
    """Change that the role makes to its workers' whole processes, such as a library that it patches
    there; roles that say different things cannot be on one worker."""
    notes: tuple[str, ...] = ()
    """Sentences for readers of a plan."""
    reads: tuple[str, ...] = ()
    """Folders, local or by URL, that each worker of the role must be able to read."""
    columns: frozenset[str] = frozenset()
    """Columns that the option ``columns`` of the role's nodes must name: those that its function
    has an argument for, and no default."""


Preflight = Callable[[Mapping[str, Any], Sequence[str], Any], RoleCost]
"""``(options, workers, config) -> RoleCost``: checks a role before anything starts.

``options`` are those that are bound to the builder, ``workers`` the names of the role's workers in
rank order, ``config`` the run's Config. ConfigError or PlanError for what cannot work.
"""


Groups = Callable[[Mapping[str, Any], int], Mapping[str, int]]
"""``(options, workers) -> {config key: size}``: sizes of the groups that the ranks of a role on
``workers`` form.

A group is ``size`` neighbours in rank order that speak with each other all the time, such as the
ranks of an engine; the planner puts each on one host where it can. ``options`` are those that are
bound to the builder.
"""


Beside = Callable[[Mapping[str, Any]], bool]
"""``(options) -> bool``: whether a role's object works on rows beside the worker's own thread, such
as in processes.

Only then does a node of the role gain by beginning with finished rows (``@columns(by_row=...)``).
"""


Specs = Callable[[Mapping[str, Any]], Mapping[str, object]]
"""``(options) -> {text: object}``: objects of the user's own that options of a builder name, by the
texts that name them. They travel to the workers, which may be unable to import them.
"""


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration that ``@builds`` puts on a builder."""

    preflight: Preflight
    provides: frozenset[str]
    groups: Groups | None
    beside: Beside | None
    specs: Specs | None


def builds(
    *,
    preflight: Preflight,
    provides: Iterable[str] = (),
    groups: Groups | None = None,
    beside: Beside | None = None,
    specs: Specs | None = None,
) -> Callable[[_F], _F]:
    """Declare beside a role's builder how it is checked, and what it costs, before a run starts.

    ``provides`` are capabilities that all its roles have (see ``RoleCost.provides``); ``preflight``
    may add more. ``groups`` tells which of its ranks belong on one host; None: each rank stands for
    itself. ``beside`` tells whether it works on rows while its worker does something else; None: it
    does not. ``specs`` loads the user's objects that its options name; None: they name none.
    """
    declared = Declared(preflight, frozenset(provides), groups, beside, specs)

    def attach(fn: _F) -> _F:
        fn.__builds__ = declared  # type: ignore[attr-defined]
        return fn

    return attach


def preflight_of(build: Callable[..., Any]) -> Preflight | None:
    """Return the check that a role's builder declares, or None."""
    declared: Declared | None = getattr(bare(build), "__builds__", None)
    if declared is None:
        return None
    return declared.preflight


def provides_of(build: Callable[..., Any]) -> frozenset[str]:
    """Return the capabilities of all roles of this builder."""
    declared: Declared | None = getattr(bare(build), "__builds__", None)
    if declared is None:
        return frozenset()
    return declared.provides


def groups_of(build: Callable[..., Any], workers: int) -> dict[str, int]:
    """Return the sizes of the groups of ranks that a role on ``workers`` workers forms, by their
    config key.
    """
    declared: Declared | None = getattr(bare(build), "__builds__", None)
    if declared is None or declared.groups is None:
        return {}
    return {
        key: size for key, size in declared.groups(options_of(build), workers).items() if size > 1
    }


def specs_of(build: Callable[..., Any]) -> Mapping[str, object]:
    """Return the user's objects that the options of a role's builder name, loaded here."""
    declared: Declared | None = getattr(bare(build), "__builds__", None)
    if declared is None or declared.specs is None:
        return {}
    return declared.specs(options_of(build))


def works_beside(build: Callable[..., Any]) -> bool:
    """Return whether the role of this builder works on rows while its worker does something
    else.
    """
    declared: Declared | None = getattr(bare(build), "__builds__", None)
    if declared is None or declared.beside is None:
        return False
    return declared.beside(options_of(build))
