"""A plan as text, for ``siirl-dask plan``; as readable for 1,024 workers as for 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from siirl_dask.errors import counted
from siirl_dask.planner import (
    Chain,
    Edge,
    Estimate,
    LoadPrompts,
    NodeColumns,
    Plan,
    Recv,
    Restore,
    RunNode,
    Save,
    SaveState,
    Send,
    Stream,
    TableSizes,
    estimate,
    short_name,
)
from siirl_dask.planner.spec.names import PACKAGE
from siirl_dask.schema import IDENTITY
from siirl_dask.wording import LEAST, readable_bytes, steps_behind, table, worker_ranges


def describe(plan: Plan, sizes: TableSizes) -> str:
    """Describe the DAG, each worker's chain, and every edge with its workers, its columns and a
    bound of its bytes.
    """
    workers = tuple(plan.chains)
    estimates = estimate(plan, sizes)
    sections = {
        _title(plan, sizes): _roles(plan, workers),
        f"{counted(len(plan.dag.nodes), 'node')} (a dot stands for {PACKAGE})": _nodes(
            plan.flow.values()
        ),
        "The chain of each worker": _chains(plan, workers),
        f"Edges (columns besides {', '.join(IDENTITY)}, which are on each)": _edges(
            plan, workers, estimates
        ),
    }
    texts = [f"{title}\n{body}" for title, body in sections.items()]
    return "\n\n".join([*texts, _total(estimates)]) + "\n"


def _title(plan: Plan, sizes: TableSizes) -> str:
    roles = counted(len(plan.dag.roles), "role")
    workers = counted(len(plan.chains), "worker")
    return f"{roles} on {workers}, {counted(sizes.prompts, 'prompt')} a step"


def _roles(plan: Plan, workers: tuple[str, ...]) -> str:
    builds = {role.name: short_name(role.build) for role in plan.dag.roles}
    rows = [
        (name, build, worker_ranges(plan.placement[name], workers))
        for name, build in builds.items()
    ]
    return table(("role", "built by", "workers"), rows)


def _nodes(flow: Iterable[NodeColumns]) -> str:
    rows = []
    for node_columns in flow:
        node = node_columns.node
        columns = f"{', '.join(node_columns.reads) or '-'} -> {', '.join(node.contract.writes.names) or '-'}"
        if node.save_as:
            columns += f", saved as {node.save_as!r}"
        elif node.stage:
            columns += ", stored as a stage"
        rows.append(
            (node.name, short_name(node.fn), node.role, ", ".join(node.after) or "-", columns)
        )
    return table(("node", "function", "role", "after", "reads -> writes"), rows)


def _chains(plan: Plan, workers: tuple[str, ...]) -> str:
    """Return the table of chains; workers with equal chains share a line."""
    workers_of: dict[str, list[str]] = {}
    for worker, chain in plan.chains.items():
        workers_of.setdefault(_chain(chain), []).append(worker)
    return table(
        ("workers", "chain"),
        [(worker_ranges(same, workers), text) for text, same in workers_of.items()],
    )


def _chain(chain: Chain) -> str:
    """Return the nodes in order, each with the nodes that it receives rows from and sends rows
    to.
    """
    steps: list[str] = []
    notes: dict[str, list[str]] = {}

    def begin(name: str) -> None:
        finish()
        steps.append(name)
        words = (
            "begins during",
            "from",
            "in parts from",
            "to",
            "in parts to",
            "statistics to",
            "saves",
        )
        notes.update({word: [] for word in words})

    def finish() -> None:
        text = "; ".join(f"{word} {', '.join(names)}" for word, names in notes.items() if names)
        if steps and text:
            steps[-1] += f" ({text})"

    received: list[str] = []  # since the node before
    for link in chain.flat:
        match link:
            case LoadPrompts():
                received.append("data")
            case Recv(edge):
                received.append(edge.source)
            case Restore(node, table):
                begin(node.name)
                notes["from"].append(f"stored {table}")
            case RunNode(node, early=early):
                begin(f"{node.name}, {steps_behind(node.lag)}" if node.lag else node.name)
                notes["from"] = received
                received = []
                if early is not None:
                    notes["begins during"].append(early.node)
            case Stream(source, target, gives, takes):
                if gives:
                    begin(source.name)
                    notes["from"] = received
                    received = []
                    notes["in parts to"].append(target.name)
                if takes:
                    begin(
                        f"{target.name}, {steps_behind(target.lag)}" if target.lag else target.name
                    )
                    notes["in parts from"].append(source.name)
            case Send(edge):
                notes["to" if edge.moves else "statistics to"].append(edge.target)
            case Save(table=table) | SaveState(table=table):
                notes["saves"].append(table)
    finish()
    if steps:
        return " > ".join(steps)
    return "nothing"


def _edges(
    plan: Plan, workers: tuple[str, ...], estimates: Mapping[tuple[str, ...], Estimate]
) -> str:
    edges = {edge.ends: edge for edge in plan.edges}
    rows = []
    for ends, size in estimates.items():
        source, target = ends[:2]
        node_columns = plan.flow[target]
        edge = edges.get(ends)
        policy = str(node_columns.node.rows if edge is None else edge.rows)
        if edge is not None and edge.by_group:
            policy = "by group"
        elif edge is not None and edge.by_minibatch:
            policy += " by minibatch"
        if plan.streams.get(source) == target:
            policy += " in parts"
        if edge is not None and edge.moves:
            where = _ends(edge, plan, workers)
            columns = [name for name in edge.schema.names if name not in IDENTITY]
            at_most = "?"
            if size.bytes is not None:
                at_most = f"<= {readable_bytes(size.bytes)}"
        else:
            where = "local, guide"
            if edge is None:
                where = "local"
            at_most = "-"
            columns = [
                name
                for name, node in node_columns.sources.items()
                if node == source and name not in IDENTITY
            ]
        marked = ", ".join(f"{name}?" if name in size.unknown else name for name in columns)
        count = "?"
        if size.rows is not None:
            count = str(size.rows)
        rows.append((f"{source} -> {target}", f"{count} {policy}", where, at_most, marked or "-"))
    return table(("edge", "rows", "workers", "bytes", "columns"), rows)


def _ends(edge: Edge, plan: Plan, workers: tuple[str, ...]) -> str:
    """Return the workers at both ends of an edge, by count and role if the names would take
    several lines.
    """
    text = f"{worker_ranges(edge.sources, workers)} -> {worker_ranges(edge.targets, workers)}"
    if len(text) <= LEAST:
        return text
    source, target = (plan.flow[name].node.role for name in (edge.source, edge.target))
    return f"{len(edge.sources)} of {source} -> {len(edge.targets)} of {target}"


def _total(estimates: Mapping[tuple[str, ...], Estimate]) -> str:
    sizes = list(estimates.values())
    text = (
        f"Between workers: at most {readable_bytes(sum(size.bytes or 0 for size in sizes))} a step"
    )
    if any(size.unknown or size.bytes is None for size in sizes):
        text += ", and columns marked '?', whose size is not known"
    guide = (
        "local: rows stay in their process. guide: they stay, and decide where the other parents' "
        "rows go."
    )
    return f"{text}.\n{guide}"
