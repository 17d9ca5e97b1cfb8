"""Contracts: a node function declares its columns and rows (``@columns``), a role's builder its
needs (``@builds``).

Both put one attribute on the function. A wrapper made with ``functools.wraps`` therefore declares
the same, and so does a ``functools.partial``, whose options count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, TypeVar

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.schema import Schema, make_schema

NodeFn = Callable[..., Any]
"""``(Context, pa.Table, **options) -> pa.Table``; options are bound with functools.partial."""
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Functions that give a model's weights piece by piece, so that they are never whole in
    memory.
    """

    tables: Callable[..., Any]
    """``(Context, pa.Table, *, max_bytes, **options) -> RowStream`` of tables of at most
    ``max_bytes``, or one row. All workers of the role make as many, with the same rows in the same
    order."""
    tensors: Callable[..., Any] | None = None
    """``(Context, pa.Table, **options) -> RowStream`` of tensors, one a row, for a broadcast from
    device to device, in which only the first worker's are sent. None: the weights travel as tables
    alone."""


@dataclass(frozen=True, slots=True)
class WeightSink:
    """Functions that take what a WeightSource gives. Both are called with ``(Context, RowStream,
    **options)``.
    """

    tables: Callable[..., Any]
    tensors: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Functions that store the rows which a node keeps from step to step (``Context.state``),
    and give them back.
    """

    pack: Callable[..., Any]
    """``(Context, **options) -> pa.Table``: what this worker keeps after the step, with the ids and
    groups of its rows; a table without rows where that is nothing."""
    unpack: Callable[..., Any]
    """``(Context, pa.Table, **options)``: take rows that workers had packed, groups whole; called
    before the first step."""


class Groups(StrEnum):
    """The groups of rows that a node makes of its input's rows."""

    KEPT = "kept"
    """Each row has the group_id of the row that it comes of; with ``expand`` several may come of
    one, else one at most. Blobs go past such a node, by group."""
    NEW = "new"
    """Groups get new numbers, or some are of earlier steps. The rows of a group come of one row, or
    of rows that share their blobs: so they share them too, and they go on by group from this node's
    table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractChanges:
    """Additions to a node's contract that depend on its options."""

    reads: Sequence[str] = ()
    optional: Sequence[str] = ()
    writes: Mapping[str, Any] = field(default_factory=dict)
    """Columns and their Arrow types."""
    neighbour: str | None = None
    """See ``Contract.neighbour``."""
    draws: bool = False
    """See ``Contract.draws``."""
    carries: KeptRows | None = None
    """See ``Contract.carries``."""
    drops: Sequence[str] = ()
    """See ``Contract.drops``."""
    groups: Groups | None = None
    """See ``Contract.groups``; None: as declared."""
    of_groups: Sequence[str] = ()
    """See ``Contract.of_groups``."""
    in_flight: bool = False
    """See ``Contract.in_flight``."""


@dataclass(frozen=True, slots=True)
class Contract:
    """Columns that a node function reads and writes, its effect on rows, and its needs."""

    reads: tuple[str, ...] = ()
    """Columns that must be there."""
    writes: Schema = field(default_factory=lambda: make_schema({}))
    optional: tuple[str, ...] = ()
    """Columns that it reads if they are there: a node upstream writes them, or the dataset has
    them."""
    if_written: tuple[str, ...] = ()
    """Columns that it reads if a node upstream writes them. A dataset's column of that name is
    something else."""
    new_rows: bool = False
    """True if its output has other rows than its input."""
    passes: bool = True
    """True if the input's columns travel on."""
    drops: tuple[str, ...] = ()
    """Columns of the input that end here, where the others travel on."""
    one_of: tuple[str, ...] = ()
    """Columns that it reads if a node upstream writes them; at least one of them must be
    written."""
    draws: bool = False
    """True if it asks for more prompts than the step's own (``Context.draw_prompts``); it must then
    be the only node without parents."""
    stateful: bool = False
    """True if it changes its role's object, as an update does. A step that is replayed from stored
    rows runs such a node again, and skips others whose output is stored."""
    carries: KeptRows | None = None
    """Functions that store the rows that it keeps from step to step, and give them back; None if it
    keeps none."""
    expand: str | Sequence[str] | None = None
    """Dotted name of the option that holds the rows made per row, for estimates; several are
    multiplied. None: no more than come in."""
    groups: Groups | None = None
    """Groups of its new rows. None: unknown, so that a blob goes along with each of its rows."""
    of_groups: tuple[str, ...] = ()
    """Columns that it writes with the same value in all rows of a group."""
    requires: tuple[str, ...] = ()
    """Capabilities that its role must have (``RoleCost.provides``), such as ``adapters``."""
    neighbour: str | None = None
    """Role that must be on each of the node's workers, because the node uses its entry of
    ``ctx.resources``."""
    early: tuple[str, ...] = ()
    """Columns that it can hand over row by row, while it makes others (``Context.hand_over``)."""
    by_row: Callable[..., Any] | None = None
    """``(resource, **options) -> RowWork``: begins the node's work on rows that a node before it
    has finished, while that makes others. What the node adds to a row depends on that row alone.
    None: it begins when all are there."""
    stream: WeightSource | WeightSink | None = None
    """Functions that give or take a model's weights piece by piece, where the plan allows it."""
    in_flight: bool = False
    """True if it loads new weights of its role while it runs (``Context.arriving_weights``): those
    that a node with a lag loads otherwise, whose table therefore travels whole."""
    trial: Callable[..., None] | None = None
    """Function of the node's options that raises if they cannot work; called before a run
    starts."""
    learns_alone: Callable[..., bool] | None = None
    """Function of the node's options: whether what it computes tells a good sample from a bad one
    where each prompt has one sample alone; asked before a run starts. None: it does."""
    depends_on_options: Callable[..., ContractChanges] | None = None
    """Function of the node's options, defaults included, that returns what they add to this
    contract."""


def columns(
    *,
    reads: Iterable[str] = (),
    writes: Mapping[str, Any] | None = None,
    optional: Iterable[str] = (),
    if_written: Iterable[str] = (),
    one_of: Iterable[str] = (),
    new_rows: bool = False,
    passes: bool = True,
    stateful: bool = False,
    expand: str | Sequence[str] | None = None,
    groups: str | None = None,
    requires: Iterable[str] = (),
    early: Iterable[str] = (),
    by_row: Callable[..., Any] | None = None,
    trial: Callable[..., None] | None = None,
    learns_alone: Callable[..., bool] | None = None,
    stream: WeightSource | WeightSink | None = None,
    depends_on_options: Callable[..., ContractChanges] | None = None,
) -> Callable[[_F], _F]:
    """Declare a node function's contract where its code is; see Contract for each argument.

    ``writes`` maps columns to Arrow types. ``expand`` implies ``new_rows``. TypeError for a
    WeightSource or ``groups`` of a function that makes no new rows, and for ``by_row`` of one that
    does.
    """
    if expand is not None:
        new_rows = True
    if isinstance(stream, WeightSource) and not new_rows:
        raise TypeError(
            "stream=WeightSource(...): only a function with new_rows=True can give parts of its "
            "table"
        )
    if by_row is not None and new_rows:
        raise TypeError("by_row=...: only a function that keeps its rows works on each by itself")
    if groups is not None and (not new_rows or groups not in list(Groups)):
        raise TypeError(
            f"groups={groups!r}: expected 'kept' or 'new', of a function with new_rows=True or "
            "expand=..."
        )
    contract = Contract(
        reads=tuple(reads),
        writes=make_schema(writes or {}),
        optional=tuple(optional),
        if_written=tuple(if_written),
        new_rows=new_rows,
        passes=passes,
        one_of=tuple(one_of),
        stateful=stateful,
        expand=expand,
        groups=None if groups is None else Groups(groups),
        requires=tuple(requires),
        early=tuple(early),
        by_row=by_row,
        stream=stream,
        trial=trial,
        learns_alone=learns_alone,
        depends_on_options=depends_on_options,
    )

    def attach(fn: _F) -> _F:
        fn.__contract__ = contract  # type: ignore[attr-defined]
        return fn

    return attach


def reads_option(name: str) -> Callable[..., ContractChanges]:
    """Return a value of ``depends_on_options`` that adds the columns listed by the option
    ``name`` to the reads.
    """

    def changes(**options: Any) -> ContractChanges:
        return ContractChanges(reads=tuple(options.get(name) or ()))

    return changes


def contract_of(fn: NodeFn) -> Contract:
    """Return a function's contract, bound options included. One without ``@columns`` reads and
    writes nothing.
    """
    declared: Contract = getattr(bare(fn), "__contract__", Contract())
    if declared.depends_on_options is None:
        return declared
    changes = declared.depends_on_options(**all_options(fn))
    writes = {column.name: column.type for column in declared.writes} | dict(changes.writes)
    return replace(
        declared,
        reads=tuple(dict.fromkeys((*declared.reads, *changes.reads))),
        optional=tuple(dict.fromkeys((*declared.optional, *changes.optional))),
        writes=make_schema(writes),
        neighbour=changes.neighbour,
        draws=changes.draws,
        carries=changes.carries,
        drops=tuple(changes.drops),
        groups=changes.groups or declared.groups,
        of_groups=tuple(changes.of_groups),
        in_flight=changes.in_flight,
    )


def bare(fn: Any) -> Any:
    """Return the function without the options that are bound to it."""
    if isinstance(fn, partial):
        return fn.func
    return fn


def options_of(fn: Any) -> Mapping[str, Any]:
    """Return the options that are bound to a function."""
    if isinstance(fn, partial):
        return fn.keywords
    return {}


def all_options(fn: Any) -> dict[str, Any]:
    """Return the bound options over the defaults of keyword-only parameters."""
    return {**_keyword_defaults(bare(fn)), **options_of(fn)}


@lru_cache(maxsize=1024)
def _keyword_defaults(fn: NodeFn) -> dict[str, Any]:
    """Return the defaults of a function's keyword-only parameters. A plan asks a thousand times."""
    return {
        p.name: p.default
        for p in inspect.signature(fn).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def check_options(fn: Any, options: Mapping[str, Any], label: str) -> None:
    """Raise PlanError for an option that the function does not have, with the nearest spelling, or
    for a missing one.

    ``**extra`` does not count: an option that the function does not name is a mistake.
    """
    parameters = inspect.signature(fn).parameters.values()
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    known = []
    for p in parameters:
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty:
            known.append(p.name)
    known += [p.name for p in keyword_only]
    for name in options:
        if name not in known:
            raise PlanError(
                f"{label} has no option {name!r} (options: {known}){did_you_mean(str(name), known)}"
            )
    for p in keyword_only:
        if p.default is p.empty and p.name not in options:
            raise PlanError(
                f"{label} needs the option {p.name!r}: give it under 'with', or as an argument of "
                "Node"
            )


def option_at(fn: Any, path: str) -> Any:
    """Return the value at a dotted path into a function's options, their dataclasses and
    mappings; None if absent.
    """
    defaults = {p.name: p.default for p in inspect.signature(bare(fn)).parameters.values()}
    value: Any = {**defaults, **options_of(fn)}
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value
