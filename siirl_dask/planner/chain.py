"""Plans as data: edges between groups of workers, for each worker a chain of links, and iterations:
passages of all workers through the chains of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from siirl_dask.planner.column_flow import NodeColumns
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.hosts import Hosts
from siirl_dask.planner.node import Node, Rows
from siirl_dask.schema import Schema


@dataclass(frozen=True, slots=True)
class EarlyColumns:
    """Columns that may go on row by row, along an edge or to a node below, while their node
    still makes other rows.
    """

    node: str
    """Node that hands over its finished rows: the edge's source or the node's parent, or one above
    it on the same workers."""
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """Rows of one node that move to the workers of another.

    The source is a parent of the target, or for blobs a node further above. By group, an edge takes
    one row of each group of the source to every worker that has a row of the group. The statistics
    of ``guide``, one of the target's edges, decide the owner of each row for all edges into the
    target, so that a join finds its rows on one worker. An edge without columns moves no rows: it
    is a guide whose rows are in place already.
    """

    source: str
    target: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    rows: Rows
    by_minibatch: bool
    """True if each mini-batch is balanced on its own."""
    schema: Schema
    """Columns of the rows that move."""
    guide: str
    """Source node of the edge whose statistics decide the owners."""
    early: EarlyColumns | None = None
    """Columns that may travel before the source's table is whole; None where a worker is a source
    and a target, or no node hands over its rows. Rows of such an edge prefer a target each: see
    ``layout.balance``."""
    by_group: bool = False
    """True if it moves groups: one row of each to every target that owns a row of it by the
    guide, or to all."""

    @property
    def name(self) -> str:
        name = f"{self.source}->{self.target}"
        if self.by_group:
            return f"{name} by group"
        return name

    @property
    def ends(self) -> tuple[str, ...]:
        """Source and target, and the words ``by group``: no two edges of a plan have the same."""
        if self.by_group:
            return (self.source, self.target, "by group")
        return (self.source, self.target)

    @property
    def moves(self) -> bool:
        return len(self.schema) > 0


@dataclass(frozen=True, slots=True)
class Input:
    """Columns that a node takes from a table. The executor names a table after its node, or
    after its edge.
    """

    table: str
    columns: tuple[str, ...]
    by_group: bool = False
    """True if the table has a row for each group, and the node gets its values in all rows of
    the group."""


@dataclass(frozen=True, slots=True)
class LoadPrompts:
    """Read this worker's share of the step's prompts, as table ``name``."""

    name: str
    columns: tuple[str, ...]
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class RunNode:
    """Run a node on the join of its inputs, and keep ``columns`` of its table."""

    node: Node
    inputs: tuple[Input, ...]
    columns: tuple[str, ...]
    early: EarlyColumns | None = None
    """Node above it on this worker with whose finished rows it begins, and the columns that it
    takes of them; None: it begins when all rows are there."""


@dataclass(frozen=True, slots=True)
class Send:
    """Publish the edge's source table and its statistics to the peers that pull them."""

    edge: Edge


@dataclass(frozen=True, slots=True)
class Recv:
    """Pull the edge's rows that this worker owns."""

    edge: Edge
    guide: Edge
    have: tuple[str, ...] = ()
    """Tables of this worker with groups of the edge, which are not pulled again."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write a node's output on this worker as part ``index`` of ``count`` of ``table``, a folder
    below the run's.
    """

    node: str
    table: str
    index: int
    count: int
    shared: tuple[str, ...] = ()
    """Blobs that the rows of a group share: one row of each group is written with them, the
    others without."""


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write what a node keeps on this worker for later steps, as part ``index`` of ``count`` of
    ``table``.
    """

    node: Node
    table: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Report what this worker logged on the way to a saved table, of which it has no part, and its
    dataloader's position.
    """

    table: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Read this worker's share of the rows that ``table``, a folder below the run's, holds of the
    step, as a node's output.
    """

    node: Node
    table: str
    schema: Schema
    """Columns that a later node reads."""
    index: int
    count: int
    shared: tuple[str, ...] = ()
    """Columns of which the table has one value per group, for all of its rows; groups are read
    whole then."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a table that no later link of this worker reads."""

    table: str


@dataclass(frozen=True, slots=True)
class Lagged:
    """Run links as in the iteration ``steps`` steps earlier; skip them where there was none."""

    steps: int
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """Run two nodes at once, piece by piece, so that neither's table is ever whole in memory.

    Each piece of the table that ``source`` makes goes to the workers of ``target`` at once, and is
    freed soon after.
    """

    source: Node
    target: Node
    gives: bool
    """True on the workers of the source."""
    takes: bool
    """True on the workers of the target."""
    inputs: tuple[Input, ...]
    """The source's inputs; empty on a worker that only takes."""
    columns: tuple[str, ...]
    """Columns of a piece."""
    edge: Edge | None
    """Edge of the pieces; None where each worker takes its own, as it has both nodes: tensors, if
    the nodes handle them."""
    joins: tuple[str, ...] = ()
    """Workers of a broadcast of the table as tensors: the source's first worker, and all of the
    target's. Empty where no broadcast is possible.
    """


Link = (
    LoadPrompts
    | Restore
    | RunNode
    | Send
    | Recv
    | Save
    | SaveState
    | ReportTable
    | Drop
    | Lagged
    | Stream
)


@dataclass(frozen=True, slots=True)
class Chain:
    """The links of one worker in a step, in order. All workers share one global order of the
    nodes.
    """

    worker: str
    links: tuple[Link, ...]

    @property
    def loads(self) -> bool:
        """Whether the worker reads prompts of the dataset."""
        return any(isinstance(link, LoadPrompts) for link in self.flat)

    @property
    def saved(self) -> list[str]:
        """Tables of which this worker saves or reports a part."""
        return [
            link.table for link in self.flat if isinstance(link, Save | SaveState | ReportTable)
        ]

    @property
    def flat(self) -> Iterator[Link]:
        """Yield its links; a Lagged link is replaced by the links in it."""
        for link in self.links:
            if isinstance(link, Lagged):
                yield from link.links
            else:
                yield link


@dataclass(frozen=True, slots=True)
class Plan:
    """A DAG on workers: who computes what, and which rows move between them."""

    dag: DAG
    placement: Mapping[str, tuple[str, ...]]
    """Workers of each role, in rank order."""
    flow: Mapping[str, NodeColumns]
    """Columns of each node, in the order of the DAG."""
    edges: tuple[Edge, ...]
    """Edges that move rows or guide others."""
    chains: Mapping[str, Chain]
    dataset: Schema
    """Columns of the dataset, for which the DAG was planned."""
    streams: Mapping[str, str] = field(default_factory=dict)
    """Target node of each source node whose table is streamed piece by piece."""
    hosts: Hosts = field(default_factory=dict)
    """Host of each worker; empty where all are on one."""
    whole: frozenset[str] = frozenset()
    """Nodes whose tables were not to be streamed."""
    overlap: bool = True
    """Whether nodes may begin with finished rows of a node above."""

    @property
    def lagged_streams(self) -> frozenset[str]:
        """Source nodes of streams whose target is steps ahead."""
        return frozenset(
            source for source, target in self.streams.items() if self.dag.node(target).lag
        )


class Phase(StrEnum):
    """The kind of an iteration; all workers are in the same phase."""

    TRAIN = "train"
    REPLAY = "replay"
    """Training step of a resumed run whose rows are stored: its updates are repeated, and
    nothing is generated."""
    VALIDATION = "validation"
    TEST = "test"
    EVALUATION = "evaluation"
    """Pass over a dataset outside a training run (``siirl-dask eval``)."""
    WEIGHTS = "weights"
    """Transfer of the restored weights to the engines, in a resumed run."""
    CHECKPOINT = "checkpoint"
    """Saving of the roles' states; no chain is run."""

    @property
    def counts_as(self) -> Phase:
        """The phase under which its steps are logged and its nodes keep their state: a replay is
        training.
        """
        if self is Phase.REPLAY:
            return Phase.TRAIN
        return self


def replay_plan(frontier: str) -> str:
    """Return the name of the plan of steps that are replayed from the rows of the table
    ``frontier``.
    """
    return f"{Phase.REPLAY}:{frontier}"


def phase_of(plan: str) -> Phase:
    """Return the phase of a plan's name, as ``Iteration.plan`` gives it."""
    return Phase(plan.partition(":")[0])


@dataclass(frozen=True, slots=True)
class Iteration:
    """One passage of all workers through the chains of a phase."""

    phase: Phase
    step: int
    """Step that is trained, from 1; in other phases, the number of steps trained before."""
    sequence: int
    """Number of the iteration in the run, which makes the keys of its messages unique."""
    drain: bool = False
    """True if no training step follows at once, so that nodes with a lag catch up in this
    iteration."""
    position: int | None = None
    """Number of the next prompt after a replayed step that had drawn more prompts than its own."""
    frontier: str = ""
    """Table whose rows a replayed step begins with."""

    @property
    def plan(self) -> str:
        """Name of the plan whose chains it runs: its phase, and for a replay also the frontier."""
        if self.phase is Phase.REPLAY:
            return replay_plan(self.frontier)
        return self.phase

    @property
    def batch(self) -> int:
        """Number of the dataset's batch that the iteration reads, from 0."""
        return max(self.step - 1, 0)

    def __str__(self) -> str:
        return f"{self.phase} step {self.step}"
