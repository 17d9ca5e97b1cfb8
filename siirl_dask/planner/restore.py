"""Cuts a DAG at a table that is stored: what a step still has to do when its rows are there.

The node that stores the table, and the nodes before it, are not run again: a node without parents
takes their place, whose rows are read. What follows runs as before. So does a node before it that
changes its role's object (``@columns(stateful=True)``), on the stored rows; and it takes nothing
from its parents but stored columns.

Each table from which a step can go on so is a frontier: those that nodes save for good
(``save_as``), and stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from siirl_dask.errors import PlanError
from siirl_dask.planner.column import Column
from siirl_dask.planner.column_flow import NodeColumns, trace_columns
from siirl_dask.planner.contract import ContractChanges, bare, columns
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.node import Node
from siirl_dask.schema import IDENTITY, IMAGES, TYPES, Schema, is_blob, make_schema

NO_DATA: Schema = make_schema({name: TYPES[name] for name in IDENTITY})
"""Columns of the dataset for which a cut DAG is planned: it reads none."""


STORED = "stored"
"""Name of the node that stands for stored rows, where nodes are run again."""


def _of_groups(*, of_groups: Sequence[str] = (), **options: object) -> ContractChanges:
    return ContractChanges(of_groups=tuple(of_groups))


@columns(new_rows=True, passes=False, depends_on_options=_of_groups)
def stored_rows(context: Any, rows: Any, *, table: str, of_groups: Sequence[str] = ()) -> Any:
    """Stand for rows of the run's table ``table``: the plan has a Restore link for a node with
    this function.
    """
    raise AssertionError(f"rows of {table!r} are read by a link of the chain, not by a node")


@dataclass(frozen=True, slots=True)
class Cut:
    """A DAG without the nodes whose output a stored table holds."""

    dag: DAG
    node: str
    """Node that stored the table, whose name the stored rows have."""
    table: str
    """Folder of the table below the run's."""
    spent: tuple[str, ...] = ()
    """Tables of stages that a step does not need any more once it has stored this one."""

    @property
    def generates(self) -> bool:
        """Whether a node is left that makes several rows of each, as generation does."""
        return any(node.contract.expand is not None for node in self.dag.nodes)


def frontiers(dag: DAG, flow: Mapping[str, NodeColumns]) -> tuple[list[Cut], list[str]]:
    """Return ``dag`` cut at each stored table that is enough for what follows, the furthest first.

    The furthest is the one that leaves fewest nodes. The second list has the reason for each table
    that is not enough.
    """
    cuts: list[Cut] = []
    reasons: list[str] = []
    for node in reversed(
        [node_columns.node for node_columns in flow.values() if node_columns.node.stored_as]
    ):
        try:
            cuts.append(cut_at(dag, flow, node))
        except PlanError as error:
            reasons.append(str(error))
    return sorted(cuts, key=lambda cut: len(cut.dag.nodes)), reasons


def cuts_at_stored(dag: DAG, source: Schema) -> list[Cut]:
    """Return ``dag`` cut at each of its frontiers, the furthest first.

    PlanError when nothing is stored, or none of the stored tables is enough, with the reasons.
    """
    cuts, reasons = frontiers(dag, trace_columns(dag, source))
    if not cuts and not reasons:
        raise PlanError(
            "no node stores its rows (save_as, stage), so a step that was cut short cannot be "
            "replayed from them"
        )
    if not cuts:
        raise PlanError("; ".join(reasons))
    return cuts


def cut_at(dag: DAG, flow: Mapping[str, NodeColumns], saved: Node) -> Cut:
    """Return ``dag`` without ``saved`` and the nodes before it, whose rows the stored table holds.

    PlanError, with the reason, where a node that is left needs more than the table holds.
    """
    assert saved.stored_as is not None
    skipped = nodes_before(dag, saved) | {saved.name}
    left = [node for node in dag.ordered() if node.name not in skipped or node.contract.stateful]
    for node in left:
        _check_stored(flow, node, saved, skipped)
    node_columns = flow[saved.name]
    entry = _entry(
        saved.name,
        saved.role,
        saved.stored_as,
        [node_columns.produced[name] for name in node_columns.outputs],
    )
    nodes = (
        entry,
        *(_attached(node, saved.name, skipped) for node in left if node.name != saved.name),
    )
    before = [node for node in dag.ordered() if node.name in skipped and node.name != saved.name]
    spent = tuple(str(node.stored_as) for node in before if node.stage and not node.save_as)
    return Cut(DAG(dag.roles, nodes), saved.name, saved.stored_as, spent)


def run_again(dag: DAG, source: Schema, first: str, save_as: str) -> Cut:
    """Return the nodes from ``first`` on up to the saved table, as a DAG on the rows that this
    table holds.

    ``source`` are the columns of the stored rows. The last node saves its rows as ``save_as``.
    Columns that these nodes write are computed again; all others are stored ones. PlanError when
    ``first`` is no node before a saved table, or one of the nodes needs more than the table holds.
    """
    flow = trace_columns(dag, _with_blobs(dag, source))
    saved = _saving(dag, dag.node(first))
    before = nodes_before(dag, saved) | {saved.name}
    nodes_again = [
        node
        for node in dag.ordered()
        if node.name in before and first in {node.name, *nodes_before(dag, node)}
    ]
    again = {node.name for node in nodes_again}
    for node in nodes_again:
        if flow[node.name].node.contract.new_rows or not node.after:
            raise PlanError(
                f"node {node.name!r} makes rows of its own, and only stored rows can be run again: "
                "name a later node"
            )
    for node in nodes_again:
        _check_stored(flow, flow[node.name].node, saved, before - again)
    stored_columns = []
    for column in flow[saved.name].produced.values():
        # an earlier version may have stored fewer
        if column.writer not in again and column.name in source.names:
            stored_columns.append(column)
    entry = _entry(STORED, dag.node(first).role, str(saved.save_as), stored_columns)
    nodes = []
    needed_roles: set[str | None] = set()
    for node in nodes_again:
        own_table = None
        if node.name == saved.name:
            own_table = save_as
        nodes.append(
            replace(_attached(node, STORED, before - again), stage=False, save_as=own_table)
        )
        needed_roles.add(node.role)
        needed_roles.add(node.contract.neighbour)
    roles = tuple(role for role in dag.roles if role.name in needed_roles)
    return Cut(DAG(roles, (entry, *nodes)), saved.name, str(saved.save_as))


def _with_blobs(dag: DAG, source: Schema) -> Schema:
    """Return stored columns, and those of the dataset that nodes read and that are not stored,
    as blobs are not.
    """
    types = {column.name: column.type for column in source}
    for node in dag.nodes:
        if node.after:
            continue
        for name in node.contract.reads:
            types.setdefault(name, TYPES[IMAGES])
    return make_schema(types)


def _entry(name: str, role: str, table: str, held: Iterable[Column]) -> Node:
    """Return a node that stands for the rows of a stored table."""
    columns_held = [column for column in held if column.name not in IDENTITY]
    shared = tuple(
        column.name for column in columns_held if column.of_groups and is_blob(column.type)
    )
    options: dict[str, Any] = {"table": table}
    if shared:
        options["of_groups"] = shared
    writes = make_schema({column.name: column.type for column in columns_held})
    return Node(name, stored_rows, role=role, writes=writes, options=options)


def saved_after(dag: DAG, first: Node) -> str:
    """Return the table that ``first`` saves, or the first node after it that saves one.
    PlanError if there is none.
    """
    return str(_saving(dag, first).save_as)


def _saving(dag: DAG, first: Node) -> Node:
    for node in dag.ordered():
        if node.save_as and first.name in {node.name, *nodes_before(dag, node)}:
            return node
    tables = {node.name: node.save_as for node in dag.nodes if node.save_as}
    raise PlanError(
        f"no rows are saved at node {first.name!r} or after it: name a node that is before one of "
        f"those which save rows, or is one of them ({tables})"
    )


def is_stored(node: Node) -> bool:
    """Return whether a node stands for stored rows."""
    return bare(node.fn) is stored_rows


def stored_table(node: Node) -> str:
    """Return the run's table whose rows a node stands for."""
    return str(node.options["table"])


def nodes_before(dag: DAG, node: Node) -> set[str]:
    """Return the names of all nodes that a node comes after."""
    above: set[str] = set()
    waiting = [*node.after]
    while waiting:
        name = waiting.pop()
        if name not in above:
            above.add(name)
            waiting += dag.node(name).after
    return above


def _check_stored(
    flow: Mapping[str, NodeColumns],
    node: Node,
    saved: Node,
    skipped: set[str],
) -> None:
    """Raise PlanError unless all that a node takes from skipped ones is in the saved table, as
    they made it.
    """
    node_columns = flow[node.name]
    held = flow[saved.name]
    if node.contract.carries:
        raise PlanError(
            f"node {node.name!r} keeps rows for later steps: no step goes on from table "
            f"{saved.stored_as!r}, before it"
        )
    if node.name == saved.name and node.contract.stateful:
        raise PlanError(
            f"node {node.name!r} saves its rows and changes its role: save the output of a node "
            "before it"
        )
    if not node.after and node.name in skipped:
        raise PlanError(
            f"node {node.name!r} reads the dataset and changes its role: its input is not stored"
        )
    if not node.after:
        raise PlanError(
            f"node {node.name!r} reads the dataset, and table {saved.stored_as!r} has other rows"
        )
    wanted = (
        name
        for name, source in node_columns.sources.items()
        if source in skipped and name not in IDENTITY
    )
    for name in wanted:
        column = node_columns.available[name]
        if name not in held.outputs or held.produced[name].writer != column.writer:
            raise PlanError(
                f"node {node.name!r} takes {name!r} as {column.writer!r} makes it, which table "
                f"{saved.stored_as!r} of node {saved.name!r} does not hold"
            )
    if any(parent in skipped for parent in node.after) and node_columns.rows != held.rows_out:
        raise PlanError(f"node {node.name!r} takes other rows than table {saved.stored_as!r} holds")


def _attached(node: Node, entry: str, skipped: set[str]) -> Node:
    """Return a node whose skipped parents are replaced by the node ``entry`` of the stored rows. A
    node that is itself skipped stores nothing again.
    """
    parents = [entry if parent in skipped else parent for parent in node.after]
    after = tuple(dict.fromkeys(parents))
    if node.name in skipped:
        return replace(node, after=after, save_as=None, stage=False)
    return replace(node, after=after)
