"""What a node function declares of itself: the columns it reads and writes, and what it does to rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from siirl_dask.schema import Schema, make_schema

NodeFn = Callable[..., Any]
"""``(Context, pa.Table, **options) -> pa.Table``; options are bound with functools.partial."""


@dataclass(frozen=True, slots=True)
class Contract:
    """Which columns a node function reads and writes, and what it does to rows."""

    reads: tuple[str, ...] = ()
    writes: Schema = field(default_factory=lambda: make_schema({}))
    optional: tuple[str, ...] = ()
    """Read when somebody upstream writes them."""
    new_rows: bool = False
    """The rows that come out are other rows than those that went in."""
    passes: bool = True
    """The columns that come in travel on."""
    one_of: tuple[str, ...] = ()
    """Read when somebody upstream writes them, and somebody must write at least one."""
    draws: bool = False
    """It asks for more prompts than the step's own (``Context.more``). Such a node is the only one without parents."""
    expand: str | None = None
    """Dotted name of the option that says how many rows come out per row; for estimates. None: no more than come in."""

    def taken(self, available: Collection[str]) -> tuple[str, ...]:
        """The columns it reads of those that are there."""
        maybe = (name for name in (*self.optional, *self.one_of) if name in available)
        return (*self.reads, *maybe)


_F = TypeVar("_F", bound=NodeFn)


def columns(
    *,
    reads: Iterable[str] = (),
    writes: Mapping[str, Any] | None = None,
    optional: Iterable[str] = (),
    optional_at: str | None = None,
    one_of: Iterable[str] = (),
    new_rows: bool = False,
    passes: bool = True,
    draws: bool = False,
    expand: str | None = None,
    more: str | None = None,
    writes_if: Mapping[str, Mapping[str, Any]] | None = None,
    beside: str | None = None,
    trial: Callable[..., None] | None = None,
    gives_parts: Callable[..., Any] | None = None,
    takes_parts: Callable[..., Any] | None = None,
    gives_tensors: Callable[..., Any] | None = None,
    takes_tensors: Callable[..., Any] | None = None,
) -> Callable[[_F], _F]:
    """Declare a node function's contract beside its code; see Contract for each argument.

    ``more`` names an option of the function that lists further columns it reads, and ``optional_at``, by a dotted name,
    one that names a further column which it reads when somebody upstream writes it; ``writes_if`` gives further columns
    that it writes where an option, by its dotted name, is true. ``beside`` names an option that names a role that must
    be on each of the node's workers, because it uses ``ctx.resources`` of that role. ``trial`` is called with the
    node's options when it is planned, and raises if they cannot work: a loss should not fail after the rollout.

    ``gives_parts``, of a function that makes new rows: another that makes the same table, as ``Parts`` (see context.py)
    of at most ``most`` bytes, all workers of the role as many and alike. It is called ``(Context, pa.Table, most=most,
    **options)`` in this one's place where the only node that reads the table, and that nothing comes after, declares
    ``takes_parts``: what it does with ``(Context, Parts, **options)`` where a whole table would take too much memory.

    ``gives_tensors`` and ``takes_tensors``, of functions that declare these: the same with ``Parts`` that hold tensors,
    one a row, of which the columns ``dtype`` and ``shape`` tell, and that may go from device to device. The first is
    called ``(Context, pa.Table, **options)``, and only the first worker's tensors are sent.
    """
    if gives_parts is not None and not (new_rows or expand):
        raise TypeError(
            f"gives_parts={gives_parts.__name__}: only a function that makes new_rows can make them in parts"
        )
    if (gives_tensors and not gives_parts) or (takes_tensors and not takes_parts):
        raise TypeError("gives_tensors and takes_tensors: expected gives_parts and takes_parts with them")
    contract = Contract(
        tuple(reads),
        make_schema(writes or {}),
        tuple(optional),
        new_rows or expand is not None,
        passes,
        tuple(one_of),
        draws,
        expand,
    )

    def attach(fn: _F) -> _F:
        fn.__columns__ = contract  # type: ignore[attr-defined]
        fn.__more_columns__ = more  # type: ignore[attr-defined]
        fn.__optional_at__ = optional_at  # type: ignore[attr-defined]
        fn.__writes_if__ = writes_if or {}  # type: ignore[attr-defined]
        fn.__beside__ = beside  # type: ignore[attr-defined]
        fn.__trial__ = trial  # type: ignore[attr-defined]
        fn.__gives_parts__ = gives_parts  # type: ignore[attr-defined]
        fn.__takes_parts__ = takes_parts  # type: ignore[attr-defined]
        fn.__gives_tensors__ = gives_tensors  # type: ignore[attr-defined]
        fn.__takes_tensors__ = takes_tensors  # type: ignore[attr-defined]
        return fn

    return attach


def contract_of(fn: NodeFn) -> Contract:
    """What the function declares, with the options that are bound to it."""
    declared: Contract = getattr(bare(fn), "__columns__", Contract())
    more = options_of(fn).get(getattr(bare(fn), "__more_columns__", None) or "", ())
    conditional: Mapping[str, Mapping[str, Any]] = getattr(bare(fn), "__writes_if__", {})
    writes = {column.name: column.type for column in declared.writes}
    for path, further in conditional.items():
        writes |= further if option_at(fn, path) else {}
    at: str | None = getattr(bare(fn), "__optional_at__", None)
    named = option_at(fn, at) if at else None
    optional = dict.fromkeys((*declared.optional, *([named] if named else [])))
    return replace(declared, reads=(*declared.reads, *more), writes=make_schema(writes), optional=tuple(optional))


def bare(fn: Any) -> Any:
    """Without its options."""
    return fn.func if isinstance(fn, partial) else fn


def options_of(fn: Any) -> Mapping[str, Any]:
    return fn.keywords if isinstance(fn, partial) else {}


def option_at(fn: Any, path: str) -> Any:
    """What is at a dotted path into a function's options, their dataclasses and mappings; None if there is nothing."""
    defaults = {p.name: p.default for p in inspect.signature(bare(fn)).parameters.values()}
    found: Any = {**defaults, **options_of(fn)}
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found
