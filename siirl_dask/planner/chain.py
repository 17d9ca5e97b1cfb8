"""What a plan is made of: edges between groups of workers, and per worker a chain of links. Data, no behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from siirl_dask.planner.column_flow import Stage
from siirl_dask.planner.dag import DAG, Node, Rows
from siirl_dask.schema import Schema


@dataclass(frozen=True, slots=True)
class Edge:
    """Rows of one node that move to the workers of another: of a parent, or of one further above, for its blobs.

    Where each row goes is decided by the statistics of ``guide``, one of the target's edges, and is the same for all
    edges into one target, so that a join finds its rows on one worker. An edge without columns moves no rows: it is
    only such a guide, whose rows are where they should be already.
    """

    source: str
    target: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    rows: Rows
    by_minibatch: bool
    """Each mini-batch is balanced on its own."""
    schema: Schema
    """Of the rows that move."""
    guide: str
    """Source node of the edge whose statistics decide."""

    @property
    def name(self) -> str:
        return f"{self.source}->{self.target}"

    @property
    def moves(self) -> bool:
        return len(self.schema) > 0


@dataclass(frozen=True, slots=True)
class Input:
    """Columns a node takes from a table, by the table's name in the executor: a node's, or an edge's."""

    table: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read this worker's share of the step's prompts, as table ``name``."""

    name: str
    columns: tuple[str, ...]
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run a node on the join of its inputs and keep the ``columns`` of what it gives."""

    node: Node
    inputs: tuple[Input, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Publish the edge's source table, and its statistics, to whoever asks."""

    edge: Edge


@dataclass(frozen=True, slots=True)
class Recv:
    """Pull the rows of the edge that are this worker's."""

    edge: Edge
    guide: Edge


@dataclass(frozen=True, slots=True)
class Save:
    """Write a node's output on this worker as part ``index`` of ``count`` of the run's table ``table``."""

    node: str
    table: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a table nobody on this worker reads any more."""

    table: str


@dataclass(frozen=True, slots=True)
class Lagged:
    """Links that are gone through as in the iteration of ``steps`` steps before, if there was one."""

    steps: int
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """Run two nodes at once: each part of the table that ``source`` makes goes to the workers of ``target`` as it is
    made, and is let go of before many more are. Neither's table is there as a whole.
    """

    source: Node
    target: Node
    gives: bool
    """This worker is one of the source's."""
    takes: bool
    """This worker is one of the target's."""
    inputs: tuple[Input, ...]
    """Of the source; none where this worker only takes."""
    columns: tuple[str, ...]
    """Of a part."""
    edge: Edge | None
    """None where one worker does both, alone."""
    joins: tuple[str, ...] = ()
    """Workers of a broadcast that can bring the table as tensors: the first that gives it, and all that take it. None
    where there can be no such.
    """


Link = Load | Run | Send | Recv | Save | Drop | Lagged | Stream


@dataclass(frozen=True, slots=True)
class Chain:
    """What one worker does in a step, in order. Every worker goes through the nodes in the same global order."""

    worker: str
    links: tuple[Link, ...]

    @property
    def flat(self) -> Iterator[Link]:
        """Its links, and in place of those that are behind what they are."""
        return (inner for link in self.links for inner in (link.links if isinstance(link, Lagged) else (link,)))


class Phase(StrEnum):
    """What all workers do together in an iteration."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    EVALUATION = "evaluation"
    """One pass over a dataset outside a training run (``siirl-dask eval``)."""
    WEIGHTS = "weights"
    """A resumed run brings the restored weights to the engines."""
    CHECKPOINT = "checkpoint"
    """Roles' states are saved; no chain is run."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One passage of all workers through the chains of a phase."""

    phase: Phase
    step: int
    """The step that is trained, from 1; in other phases, the number of steps trained before."""
    sequence: int
    """Counts the iterations of a run, which makes keys unique."""
    drain: bool = False
    """No training step follows at once: nodes with a lag catch up in this iteration."""

    @property
    def batch(self) -> int:
        """Number of the dataset's batch that the iteration reads, from 0."""
        return max(self.step - 1, 0)

    def __str__(self) -> str:
        return f"{self.phase} step {self.step}"


@dataclass(frozen=True, slots=True)
class Plan:
    dag: DAG
    placement: Mapping[str, tuple[str, ...]]
    """Workers of each role, in rank order."""
    stages: Mapping[str, Stage]
    edges: tuple[Edge, ...]
    """Those that move rows or guide such."""
    chains: Mapping[str, Chain]
    streams: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose tables move in parts, each with the one that takes them."""
