"""Responses that are sampled in parts, so that a step can be over between two of them.

An engine samples a request to its end. A step that takes the first groups that are whole has enough
at any time, and must not wait for the longest response under way: it asks for a part of each, and
for the next part once that one is there. Rows of a batch that is sampled together make room for
others after a part as well. vLLM finds the keys and values of the earlier parts in its prefix cache;
the transformers engine computes them again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from siirl_dask.nodes.continued.step_rules import StepRule
from siirl_dask.rollout import ContinuedRow, Generation, GenerationRequest
from siirl_dask.rollout.requests import Sampled

# The transformers engine reads a response 3.5 times again with 8 parts, in passes over many tokens
_PARTS = 8
_SHORTEST = 16  # tokens; a block of vLLM's prefix cache, which has whole blocks


@dataclass(slots=True)
class PartialSample(ContinuedRow):
    """One response, as far as it is sampled."""

    worker: str = ""
    """The worker that sampled the latest tokens."""
    budget: int | None = None
    """Tokens that may still be sampled in this step; None: any number."""

    @property
    def budget_spent(self) -> bool:
        """Whether no more may be sampled in this step."""
        return self.budget == 0

    def add_part(self, sampled: Sampled, version: int) -> None:
        """Append a part, sampled with weights of ``version`` unless the engine has recorded
        others.
        """
        self.add(sampled.generation, version)
        self.worker = sampled.worker
        if self.budget is not None:
            self.budget -= len(sampled.generation.token_ids)

    def result(self) -> Sampled:
        """Return the whole response, which has ended."""
        assert self.finish_reason is not None
        return Sampled(Generation(self.tokens, self.logprobs, self.finish_reason), self.worker)


def part_length(longest: int) -> int:
    """Return the tokens of a part, where the longest response has ``longest``."""
    return max(_SHORTEST, -(-longest // _PARTS))


@dataclass(slots=True)
class PartsQueue:
    """A RequestQueue whose requests are the next parts of responses, until each has ended or spent
    its budget, or the rule has enough. Results are ``Sampled``.
    """

    samples: Sequence[PartialSample]
    order: Sequence[int]
    """Indices of the samples to go on with: the first ones get an engine's room first, and have it
    until they end."""
    rule: StepRule
    length: int
    """Tokens of a part."""
    version: Callable[[], int]
    """Returns the version of the engine's weights."""
    on_progress: Callable[[int, int], None]
    """Called with the number of responses that have ended, and of all that go on."""
    _waiting: list[int] = field(init=False)
    """Places in ``order`` of what waits for an engine, as a heap."""
    _running: int = 0
    _ended: int = 0

    def __post_init__(self) -> None:
        self._waiting = [*range(len(self.order))]

    def next(self, limit: int, *, wait: bool) -> list[tuple[int, GenerationRequest]]:
        """Return up to ``limit`` parts, each with its sample's place as a ticket."""
        taken: list[tuple[int, GenerationRequest]] = []
        if self._has_enough():
            return taken
        while self._waiting and len(taken) < limit:
            place = heapq.heappop(self._waiting)
            sample = self.samples[self.order[place]]
            tokens = self.length
            if sample.budget is not None:
                tokens = min(tokens, sample.budget)
            taken.append((place, sample.rest(tokens)))
        self._running += len(taken)
        return taken

    def ended(self) -> bool:
        """Return whether no more parts will be asked for."""
        if self._has_enough():
            return True
        under_way = self._running + len(self._waiting)
        return under_way == 0

    def complete(self, ticket: int, result: Sampled) -> None:
        """Append a part to its response, which waits for the next one unless it has ended."""
        self._running -= 1
        sample = self.samples[self.order[ticket]]
        sample.add_part(result, self.version())
        if sample.finished:
            self._ended += 1
            self.rule.row_ended(self.order[ticket])
            self.on_progress(self._ended, len(self.order))
        elif not sample.budget_spent:
            heapq.heappush(self._waiting, ticket)

    def _has_enough(self) -> bool:
        # a row that has spent its budget is not in the queue any more
        return self.rule.has_enough(self.samples, all_begun=False)
