"""Predicts a training step: rows with lengths, a layout of workers, and a machine whose parts say
what they ask for.

The same function is used of two cores in a lab, with parts that ``parts.py`` measured, and of a
thousand devices, with parts from data sheets (``devices.py``). Which worker learns from which row
is decided by the code that decides it in a run, ``siirl_dask.coordinator.layout``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import GROUP_ID, ROW_ID, TOKENS, make_schema

from .demand import Demand, Step

Ints = NDArray[np.int64]
_SCHEMA = make_schema({name: pa.int64() for name in (ROW_ID, GROUP_ID, TOKENS)})


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers by what they do: ``together`` they all do both, otherwise engines and learners are
    different workers.
    """

    name: str
    engines: int
    learners: int
    together: bool
    minibatches: int = 1

    @property
    def workers(self) -> int:
        return self.learners if self.together else self.engines + self.learners


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, in their order: engine i generates the i-th of equal blocks."""

    prompts: Ints
    """[rows] tokens of the prompt."""
    responses: Ints
    """[rows] tokens of the response."""
    group_size: int
    """Rows of one prompt, which follow each other."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> Ints:
        return self.prompts + self.responses


class Machine(Protocol):
    """The parts of a step on one kind of machine."""

    def generate(self, prompts: Ints, responses: Ints) -> Demand:
        """Return the demand of generating on the slowest engine. [engines, rows of one] ->
        Demand.
        """
        ...

    def logprobs(self, rows: Ints, owners: Ints, learners: int) -> Demand:
        """Return the demand of a forward pass on the slowest learner; ``rows`` are the tokens that
        are computed of each row, and ``owners[i]`` has row i.
        """
        ...

    def update(self, rows: Ints, owners: Ints, learners: int) -> Demand:
        """Return the demand of one mini-batch on the slowest learner: passes, sums of gradients,
        the optimizer.
        """
        ...

    def hand_over(self, layout: Layout) -> Demand:
        """Return the demand of bringing new weights from learners to engines."""
        ...

    def fixed(self, layout: Layout, rows: StepRows) -> Demand:
        """Return the demand of the edges, the exchange of statistics and the tasks of a step."""
        ...

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt is computed once for those of its samples that are on one worker."""
        ...

    @property
    def quadratic_from(self) -> int:
        """Tokens at which attention costs as much as all the rest, by which rows are balanced;
        0: by tokens alone.
        """
        ...


def predict(layout: Layout, rows: StepRows, machine: Machine) -> Step:
    """Return the parts of a GRPO step (``siirl_dask/recipes/grpo.py``) in their order."""
    blocks = (layout.engines, -1)
    minibatch = minibatches(layout, rows)
    owners = balanced(layout, rows, machine.quadratic_from)
    owners_of_update = balanced(layout, rows, machine.quadratic_from, minibatch)
    engines = np.arange(len(rows)) * layout.engines // len(rows)
    once = prompts_once if machine.shares_prompts else all_prompts
    update = Demand()
    for number in range(layout.minibatches):
        chosen = minibatch == number
        tokens = (once(rows, owners_of_update) + rows.responses)[chosen]
        update += machine.update(tokens, owners_of_update[chosen], layout.learners)
    return {
        "generate": machine.generate(
            once(rows, engines).reshape(blocks), rows.responses.reshape(blocks)
        ),
        "logprobs": machine.logprobs(once(rows, owners) + rows.responses, owners, layout.learners),
        "update": update,
        "weights": machine.hand_over(layout),
        "fixed": machine.fixed(layout, rows),
    }


def all_prompts(rows: StepRows, owners: Ints) -> Ints:
    """Return the prompt tokens of each row. [rows]."""
    return rows.prompts


def prompts_once(rows: StepRows, owners: Ints) -> Ints:
    """Return the prompt tokens of each row that is the first of its prompt on its owner, and 0
    of others. [rows].
    """
    groups = np.arange(len(rows)) // rows.group_size
    first = np.unique(np.stack([groups, owners]), axis=1, return_index=True)[1]
    tokens = np.zeros_like(rows.prompts)
    tokens[first] = rows.prompts[first]
    return tokens


def minibatches(layout: Layout, rows: StepRows) -> Ints:
    """Return each row's mini-batch: equal blocks of whole groups."""
    groups = len(rows) // rows.group_size
    return np.repeat(np.arange(groups) * layout.minibatches // groups, rows.group_size).astype(
        np.int64
    )


def balanced(
    layout: Layout, rows: StepRows, quadratic_from: int = 0, minibatch: Ints | None = None
) -> Ints:
    """Return the learner of each row, as a run would choose it."""
    learners = tuple(f"{number}" for number in range(layout.learners))
    engines = (
        learners[: layout.engines]
        if layout.together
        else tuple(f"e{n}" for n in range(layout.engines))
    )
    edge = Edge(
        "rollout",
        "update",
        engines,
        learners,
        Rows.BALANCED,
        minibatch is not None,
        _SCHEMA,
        "rollout",
    )
    index = np.arange(len(rows))
    zero = np.zeros_like(index)
    statistics = EdgeStatistics(
        row_ids=index,
        groups=index // rows.group_size,
        tokens=rows.tokens,
        minibatches=zero if minibatch is None else minibatch,
        sources=index * layout.engines // len(rows),
        positions=index,
    )
    return assign_owners(edge, statistics, quadratic_from)


def most(values: NDArray[np.float64] | Ints, owners: Ints, learners: int) -> float:
    """Return the largest sum of ``values`` that one learner has."""
    return float(np.bincount(owners, values, learners).max()) if len(values) else 0.0
