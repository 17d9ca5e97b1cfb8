"""Nodes and roles, of which DAGs are made; each is checked as soon as it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.contract import (
    Contract,
    NodeFn,
    WeightSink,
    WeightSource,
    bare,
    check_options,
    contract_of,
    options_of,
)
from siirl_dask.planner.spec.names import canonical_text, function_name
from siirl_dask.schema import IDENTITY, Schema, make_schema

BuildFn = Callable[..., Any]
"""``(Device, Rank, **options) -> resource``."""

STAGES = "stages"
"""Folder of a run with the rows of nodes that are stored until a later table has them
(``Node.stage``)."""
TRACE = "trace"
"""Table of a run with what each worker did."""
NONFINITE = "nonfinite-"
"""How tables begin, before a node's name, with rows whose numbers were not finite."""
_NAME = re.compile(r"\w[\w-]*")


class Rows(StrEnum):
    """Layout of a node's rows among the workers of its role."""

    ANYWHERE = "anywhere"
    """Rows stay in place; those that must move go to the least loaded worker. The only choice
    without parents."""
    GROUPED = "grouped"
    """All rows of a group on one worker, tokens balanced."""
    BALANCED = "balanced"
    """Tokens balanced; each mini-batch on its own if the node reads ``minibatch``."""
    REPLICATED = "replicated"
    """All rows on every worker."""


@dataclass(frozen=True, eq=False)
class Role:
    """A model or an engine, which ``build(device, rank, **options)`` makes once on each of its
    workers.
    """

    name: str
    build: BuildFn
    at: str = ""
    """File and line of its definition, for errors."""

    def __post_init__(self) -> None:
        _check_name(_after_place(self.at, "role"), self.name)
        function_name(bare(self.build))  # raises for a function that workers cannot import
        label = _after_place(self.at, f"role {self.name!r}")
        check_options(bare(self.build), options_of(self.build), label)

    @cached_property
    def key(self) -> str:
        """Text that is equal for equal roles, written in YAML or in Python."""
        return canonical_text({"name": self.name, "build": self.build})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Role):
            return False
        return self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, eq=False)
class Node:
    """One task of the workflow: a function of a table, run on every worker of its role.

    PlanError for an invalid name, parent or option. ``reads`` and ``writes`` replace those of the
    function's ``@columns``.
    """

    name: str
    fn: NodeFn
    """``(Context, pa.Table, **options) -> pa.Table``, at the top level of a module."""
    _: KW_ONLY
    role: str
    after: Sequence[str] = ()
    """Name of its parent, or names of several; a tuple once the node is made."""
    rows: Rows | str = Rows.ANYWHERE
    """Layout of its rows among the workers of its role, or the layout's name; a ``Rows`` once
    the node is made."""
    save_as: str | None = None
    """Name of the run's table to which every worker writes its part of the output."""
    stage: bool = False
    """True if its rows are stored as soon as they are made, until a table that is saved further on
    has them: a step that is cut short in between goes on from them. It changes nothing where
    ``save_as`` stores them anyway."""
    save_blobs: bool = False
    """True if the table that it saves also holds the blobs that the rows of a group share, once
    per group."""
    lag: int = 0
    """Steps by which its input is older than the step, so that its workers do not wait for the
    step's own rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the function, which override those bound by a partial; all options once the
    node is made."""
    reads: tuple[str, ...] | None = None
    writes: Schema | None = None
    agent: str = ""
    """Agent that it works for, in a run of several: its metrics begin with the agent's name, and
    its random numbers are its own. Empty: it works for all, or there is one."""
    at: str = ""
    """File and line of its definition, for errors."""

    def __post_init__(self) -> None:
        _check_name(_after_place(self.at, "node"), self.name)
        if self.agent != "":
            _check_name(f"agent of {self.label}:", self.agent)
        parents = (self.after,) if isinstance(self.after, str) else tuple(self.after)
        object.__setattr__(self, "after", parents)
        function_name(bare(self.fn))  # raises for a function that workers cannot import
        options = {**options_of(self.fn), **self.options}
        if options:
            object.__setattr__(self, "fn", partial(bare(self.fn), **options))
        object.__setattr__(self, "options", options)
        check_options(bare(self.fn), options, self.label)
        if self.save_as is not None:
            self._check_save_as(self.save_as)
        if not isinstance(self.stage, bool):
            raise PlanError(f"{self.label} has stage={self.stage!r}: expected true or false")
        if not isinstance(self.save_blobs, bool) or (self.save_blobs and self.save_as is None):
            raise PlanError(
                f"{self.label} has save_blobs={self.save_blobs!r}: expected true or false, and "
                "save_as"
            )
        if self.writes is not None:
            types = {field.name: field.type for field in self.writes}
            object.__setattr__(self, "writes", make_schema(types))
        object.__setattr__(self, "rows", self._checked_rows())
        if not self.after and self.rows is not Rows.ANYWHERE:
            raise PlanError(
                f"{self.label} has rows={str(self.rows)!r} and no parents: its rows are as loaded"
            )
        if not isinstance(self.lag, int) or self.lag < 0 or (self.lag and not self.after):
            raise PlanError(
                f"{self.label} has lag={self.lag!r}: expected a number of steps, and parents to "
                "lag behind"
            )
        contract = self.contract
        # Layouts are computed from these; a join would not find its rows if they changed on one
        # branch only.
        changed = [
            name for name in contract.writes.names if name in IDENTITY and not contract.new_rows
        ]
        if changed:
            raise PlanError(
                f"{self.label} writes {changed} of rows that exist: only new_rows=True may"
            )

    def _check_save_as(self, table: str) -> None:
        """Refuse a name of a table that the run itself writes."""
        label = f"save_as of {self.label}:"
        _check_name(label, table)
        if table == STAGES:
            raise PlanError(f"{label} {STAGES!r} is the folder of stages: choose another name")
        if table == TRACE:
            raise PlanError(
                f"{label} {TRACE!r} is the table of the run's trace: choose another name"
            )
        if table.startswith(NONFINITE):
            raise PlanError(
                f"{label} tables named {NONFINITE}... are the run's: choose another name"
            )

    def _checked_rows(self) -> Rows:
        valid = [str(policy) for policy in Rows]
        if self.rows not in valid:
            hint = did_you_mean(str(self.rows), valid)
            raise PlanError(f"{self.label} has rows={self.rows!r}: expected one of {valid}{hint}")
        return Rows(self.rows)

    @property
    def label(self) -> str:
        """Name of the node for errors, after its file and line if known."""
        return _after_place(self.at, f"node {self.name!r}")

    @property
    def stored_as(self) -> str | None:
        """Folder below the run's in which its rows are stored at each step, for good or as a
        stage; None if nowhere.
        """
        if self.save_as is not None:
            return self.save_as
        if self.stage:
            return f"{STAGES}/{self.name}"
        return None

    @property
    def state_table(self) -> str | None:
        """Folder below the run's for the rows that it keeps for later steps; None if it keeps
        none.
        """
        if self.contract.carries is None:
            return None
        return f"{STAGES}/{self.name}.kept"

    @cached_property
    def contract(self) -> Contract:
        """Contract of the function with its options, and with the node's own ``reads`` and
        ``writes``. A plan asks for it a hundred times.
        """
        declared = contract_of(self.fn)
        reads = declared.reads if self.reads is None else tuple(self.reads)
        writes = declared.writes if self.writes is None else self.writes
        return replace(declared, reads=reads, writes=writes)

    @property
    def weight_source(self) -> WeightSource | None:
        """WeightSource with the node's options bound; None if it has none."""
        stream = self.contract.stream
        if not isinstance(stream, WeightSource):
            return None
        return WeightSource(self._bound(stream.tables), self._bound(stream.tensors))

    @property
    def weight_sink(self) -> WeightSink | None:
        """WeightSink with the node's options bound; None if it has none."""
        stream = self.contract.stream
        if not isinstance(stream, WeightSink):
            return None
        return WeightSink(self._bound(stream.tables), self._bound(stream.tensors))

    def _bound(self, function: Any) -> Any:
        """Return a function with the node's options bound; None stays None."""
        if function is None:
            return None
        return partial(function, **self.options)

    def __getstate__(self) -> dict[str, Any]:
        # fields alone: what is cached can be computed again on the other side
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def try_options(self) -> None:
        """Raise PlanError if the node's options fail the trial that its function declares."""
        trial = self.contract.trial
        if trial is not None:
            try:
                trial(**self.options)
            except Exception as error:  # a user's function may raise anything
                raise PlanError(
                    f"{self.label}: its options fail on a table without rows: "
                    f"{type(error).__name__}: {error}"
                ) from error

    @property
    def key(self) -> str:
        """Text that is equal for equal nodes, written in YAML or in Python."""
        contract = self.contract
        writes = {f.name: str(f.type) for f in contract.writes}
        parts = (
            self.name,
            self.fn,
            self.role,
            self.after,
            self.rows,
            self.save_as,
            self.stage,
            self.save_blobs,
            self.agent,
            contract.reads,
            writes,
            self.lag,
        )
        return canonical_text(parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return False
        return self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _after_place(at: str, text: str) -> str:
    """Return ``text`` for an error, after the file and line ``at`` of a definition if known."""
    if not at:
        return text
    return f"{at}: {text}"


def _check_name(label: str, name: object) -> None:
    """Refuse a name that cannot be part of file names, dotted config keys and edge names
    (``a->b``).
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(
            f"{label} {name!r} is no usable name: expected letters, digits, '_' and '-', as in "
            "'old_logp'"
        )
