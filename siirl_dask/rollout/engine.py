"""What an engine that generates must do. Token ids in, token ids out; nothing here knows a model library."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")
CPU_CACHE = "1GiB"
"""Of keys and values, for an engine on a CPU that is given no size: left to itself vLLM takes 92 % of the memory."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to draw tokens. ``temperature`` 0 is greedy; ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 are off; ``max_tokens``
    per response.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are not drawn (arXiv:2407.01082)."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides those that the model and its tokenizer name."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response."""

    token_ids: list[int]
    """Sampled tokens, the end token included when there is one."""
    logprobs: list[float]
    """Of each sampled token, under softmax(logits / temperature), before top-p, top-k and min-p. Greedy: temperature
    1.
    """
    finish_reason: FinishReason


class Tokenizer(Protocol):
    """The few verbs the data plane needs of a tokenizer."""

    def encode(self, prompt: str | Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a string as it is, or of chat messages through the model's chat template."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    prompt: Sequence[int]
    seed: int
    sampling: Sampling
    begun: int = 0
    """The last so many tokens of ``prompt`` are of the response, which goes on as if it had never been left."""


class RequestQueue(Protocol):
    """What an engine is to generate. It takes as much as it has room for, whenever it has."""

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[Any, GenerationRequest]]:
        """Requests to begin with, each with a ticket. None are left when ``wait`` gives none; without it, there are
        none yet.
        """
        ...

    def complete(self, ticket: Any, result: Generation) -> None:
        """A request has been met."""
        ...


class LocalQueue(Generic[R]):
    """Work that nobody else has a part in."""

    taken_over = 0

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting = deque(enumerate(requests))
        self._given: dict[int, R] = {}

    def next(self, limit: int, *, wait: bool) -> list[tuple[int, GenerationRequest]]:
        return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

    def complete(self, ticket: int, result: R) -> None:
        self._given[ticket] = result

    def results(self) -> list[R]:
        """In the order of the requests."""
        return [self._given[number] for number in range(len(self._given))]


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Weights of which names and shapes are known before any is there, so that they need not be collected first."""

    shapes: Mapping[str, Sequence[int]]
    """Of all of them, in the order in which they come."""
    tensors: Iterable[tuple[str, Tensor]]
    """Each is there until the next is asked for, and as long as somebody refers to it."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors)


class RolloutEngine(Protocol):
    """Generates. A row's sample depends on its prompt, its seed and the weights; never on the rows beside it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def version(self) -> int:
        """Version of the weights in use; 0 are the ones it was built with."""
        ...

    def serve(self, queue: RequestQueue) -> None:
        """Generate until there is no more to take. ValueError for a prompt without tokens."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Generation]:
        """One response per prompt, in order. Empty input, empty output."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter, by name. ValueError naming what is missing, unknown or of another shape.

        The tensors are memory of others, not to be written to, so they are copied: who keeps one keeps the trainer
        waiting. Of WeightStream no more than a layer's should be kept: together they may not fit into memory. If
        they fail half way, what it has is of both, and the run ends.
        """
        ...

    def sleep(self) -> None:
        """Give back what memory can be while others compute on the device. ``serve`` and ``load_weights`` wake it."""
        ...

    def close(self) -> None: ...


def serve_all(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
) -> list[Generation]:
    """One response per prompt, in order. ValueError unless there are as many seeds as prompts and every prompt has
    tokens.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: expected one seed a prompt")
    check_prompts(prompts)
    queue = LocalQueue[Generation](
        [GenerationRequest(prompt, seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
    )
    engine.serve(queue)
    return queue.results()


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """ValueError for one without tokens."""
    if empty := [row for row, prompt in enumerate(prompts) if not len(prompt)]:
        raise ValueError(f"prompts {empty} have no tokens: there is nothing to go on from")
