"""The protocol of rollout engines: token ids in, token ids out. Nothing here knows a model
library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from siirl_dask.context import ArrivingWeights, Closes, KeepsGroups, behind
from siirl_dask.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from siirl_dask.images import Image
    from siirl_dask.images.processor import ImageProcessor
    from siirl_dask.models.routing import Routing
    from siirl_dask.rollout.base_weights import Adapters

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """It sampled an end token."""
    LENGTH = "length"
    """It has as many tokens as it may have."""
    TURNS = "turns"
    """The episode has as many turns as it may have. No engine gives this."""
    ENVIRONMENT = "environment"
    """The environment ended the episode. No engine gives this."""
    FAILED = "failed"
    """A call of the environment gave no answer. No engine gives this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of one response."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Least probability of a token, as a fraction of the likeliest one's (arXiv:2407.01082). 0
    is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides those that the model and its tokenizer name."""

    @property
    def filters(self) -> bool:
        """Whether top-p, top-k or min-p leave tokens out."""
        if self.top_p < 1 or self.top_k > 0:
            return True
        return self.min_p > 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response."""

    token_ids: list[int]
    """The sampled tokens, with the end token if there is one."""
    logprobs: list[float]
    """Log-probability of each token under softmax(logits / temperature), before top-p, top-k and
    min-p.

    Greedy sampling counts as temperature 1.
    """
    finish_reason: FinishReason
    routes: bytes | None = None
    """Experts of each token of prompt and response but the last, as ``models/routing.py`` says;
    None: not recorded."""
    versions: list[int] | None = None
    """Version of the weights that sampled each token, of ``serve_in_flight``; None: all are the
    engine's."""

    def versions_or(self, version: int) -> list[int]:
        """Return the version of the weights that sampled each token, ``version`` where none are
        recorded.
        """
        return [version] * len(self.token_ids) if self.versions is None else self.versions


class Tokenizer(Protocol):
    """The verbs that the data plane needs of a tokenizer."""

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_answer: bool = False,
    ) -> list[int]:
        """Return the token ids of a prompt: a string, or chat messages through the model's chat
        template.

        ``tools`` are JSON schemas of what the model may call, for the template. With
        ``continue_answer`` the model goes on with a last message of the assistant's, which is a
        DataError otherwise.
        """
        ...

    def encode_more(self, text: str) -> list[int]:
        """Return the token ids of a string that goes on with an earlier one."""
        ...

    def after_turn(
        self,
        before: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        last: int,
    ) -> list[int]:
        """Return the ids that ``new`` messages add to a chat, up to where the assistant answers
        them.

        ``before`` is how the chat began; its latest turn was sampled, and ended with the id
        ``last``.
        """
        ...

    def check_turns(self) -> None:
        """Raise ConfigError for a chat template with which ``after_turn`` cannot work."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of token ids, with or without those that end a text or fill a row."""
        ...

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text without any special token; None where ``decode`` gives the same."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to be sampled."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    seed: int
    sampling: Sampling
    begun: int = 0
    """Tokens at the end of ``prompt`` that already belong to the response; it continues as if it
    was never interrupted.
    """
    images: tuple[Image, ...] = ()
    """Images that ``prompt`` shows: for each, in order, it has as many placeholders as the image
    has tokens."""
    image_starts: tuple[int, ...] | None = None
    """Place in ``prompt`` of each image's first token, where images may also be among the begun
    tokens. None: all are before those, in the order of the placeholders.
    """


class RequestQueue(Protocol):
    """The requests an engine is to serve. The engine takes as many as it has room for, whenever
    it has room.
    """

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[Any, GenerationRequest]]:
        """Return up to ``limit`` requests, each with a ticket for its result.

        With ``wait``, an empty answer means that none are left; without it, that none are there
        yet.
        """
        ...

    def ended(self) -> bool:
        """Return whether no more requests will come. Raises what is to end a wait for them.

        For engines of several ranks, which ask for requests without ``wait``, and wait together.
        """
        ...

    def complete(self, ticket: Any, result: Generation) -> None:
        """Give the result of the request that came with ``ticket``."""
        ...


class LocalQueue(Generic[I, R]):
    """A queue of one worker, from which no peer takes items: a RequestQueue where these are
    requests.

    ``R`` is the type of the results.
    """

    taken_over = 0
    """Items that came from peers."""

    def __init__(
        self, items: Sequence[I], on_result: Callable[[int, R], None] | None = None
    ) -> None:
        """``on_result`` is called with the number and the result of each item, as soon as it is
        there.
        """
        self._waiting = deque(enumerate(items))
        self._on_result = on_result
        self._results: dict[int, R] = {}

    def next(self, limit: int, *, wait: bool) -> list[tuple[int, I]]:
        return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

    def ended(self) -> bool:
        return not self._waiting

    def complete(self, ticket: int, result: R) -> None:
        self._results[ticket] = result
        if self._on_result is not None:
            self._on_result(ticket, result)

    def results(self) -> list[R]:
        """Return the results in the order of the items."""
        return [self._results[number] for number in range(len(self._results))]


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Weights that arrive one after the other, whose names and shapes are known before."""

    shapes: Mapping[str, Sequence[int]]
    """The shape of every tensor by name, in the order of arrival."""
    tensors: Iterable[tuple[str, Tensor]]
    """Names and tensors. A tensor stays until the next is asked for, and as long as somebody
    refers to it."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors)


class RolloutEngine(Closes, Protocol):
    """Generates responses. A sample depends on its prompt and what that shows, its seed and the
    weights, never on the rows beside it.

    What else an engine can do has protocols of its own: ``SeesImages``, ``TakesAdapters``,
    ``RecordsRoutes``, ``LoadsInFlight``, and, as any role's object, ``Sleeps`` and ``KeepsGroups``
    (``siirl_dask.context``).
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def context_length(self) -> int | None:
        """Most tokens of a prompt and its response together; None where the model does not say."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights in use; 0 means the weights that the engine was built with."""
        ...

    def serve(self, queue: RequestQueue) -> None:
        """Generate until the queue is empty. ValueError for a prompt without tokens; DataError for
        one that does not show its images.
        """
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Generation]:
        """Return one response per prompt, in order. Empty input gives empty output."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter, by name. ValueError naming what is missing, unknown or of
        another shape.

        The tensors share the sender's memory: copy them, do not write to them, and drop them soon,
        since the trainer waits for that memory. Keep no more than a layer of a WeightStream: all of
        it may not fit into memory. A failure half way leaves a mixture of old and new weights; the
        engine is unusable and the run ends.
        """
        ...

    def close(self) -> None:
        """Free the weights; the engine cannot be used any more."""
        ...


@runtime_checkable
class SeesImages(Protocol):
    """An engine whose prompts may show images."""

    @property
    def processor(self) -> ImageProcessor | None:
        """Processor of the images that prompts show; None where it was built for texts alone."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that takes adapters in place of weights."""

    def load_adapters(
        self, tensors: Iterable[tuple[str, Tensor]], scaling: float, version: int
    ) -> None:
        """Generate from now on as with ``W + scaling * B A`` in place of each weight W of
        ``model.path`` that has an adapter (see ``siirl_dask.models.adapters``). ValueError, before
        anything changes, for those that do not fit.

        The engine keeps the folder's weights for it, or reads them again.
        """
        ...


@runtime_checkable
class RecordsRoutes(Protocol):
    """An engine that can record which experts each token goes to."""

    @property
    def routing(self) -> Routing | None:
        """Routers and experts of the model whose samples have their routes; None where none are
        recorded.
        """
        ...


@runtime_checkable
class LoadsInFlight(Protocol):
    """An engine that takes new weights while it generates."""

    def serve_in_flight(self, queue: RequestQueue, weights: ArrivingWeights) -> None:
        """Serve as ``serve`` does. Between any two tokens of a row ask ``weights.arrived()``, and
        call ``weights.load()`` where they have, which calls ``load_weights`` or ``load_adapters``.

        Rows under way go on with the new weights, under which their keys and values are computed
        again: the other tokens and log-probs are those of a request that has the tokens so far as
        ``begun``. Every Generation has its ``versions``. The ranks of one engine load between the
        same two steps.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowPasses:
    """Passes of a model over rows that it samples, after their prompts were read."""

    tokens: int = 0
    """Tokens that were sampled in them."""
    passes: int = 0
    """Passes, each counted once for every row that had not ended."""


@runtime_checkable
class DraftsTokens(Protocol):
    """An engine that may sample several tokens of a row in one pass."""

    def take_passes(self) -> RowPasses | None:
        """Return the passes since this was called last; None where it drafts no tokens."""
        ...


@runtime_checkable
class FitsAdapters(Protocol):
    """An engine whose adapters several agents can take turns with."""

    def fit_adapters(
        self, tensors: Iterable[tuple[str, Tensor]], scaling: float, version: int
    ) -> Adapters:
        """Return a copy of adapters, for ``use_adapters``. ValueError for those that do not fit."""
        ...

    def use_adapters(self, given: Adapters, agent: str = "") -> None:
        """Generate from now on with ``given``, which are those of ``agent``, and report their
        version.
        """
        ...


@runtime_checkable
class AdaptableEngine(RolloutEngine, FitsAdapters, KeepsGroups, Protocol):
    """A RolloutEngine that several agents can have in common."""


def processor_of(engine: RolloutEngine) -> ImageProcessor | None:
    """Return the processor of the images that an engine's prompts show; None for an engine that
    takes texts alone.
    """
    own = behind(engine)
    return own.processor if isinstance(own, SeesImages) else None


def routing_of(engine: RolloutEngine) -> Routing | None:
    """Return the routers whose choices an engine records; None where it records none."""
    own = behind(engine)
    return own.routing if isinstance(own, RecordsRoutes) else None


def take_passes(engine: RolloutEngine) -> RowPasses:
    """Return the passes of an engine since this was called last; none of one that drafts no
    tokens.
    """
    own = behind(engine)
    passes = own.take_passes() if isinstance(own, DraftsTokens) else None
    return RowPasses() if passes is None else passes


def serve_all(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: Sampling,
) -> list[Generation]:
    """Serve one request per prompt and return the responses in order: what ``generate`` of an
    engine does.

    ValueError unless there is one seed per prompt and every prompt has tokens.
    """
    if len(prompts) != len(seeds):
        raise ValueError(
            f"{len(prompts)} prompts and {len(seeds)} seeds: expected one seed a prompt"
        )
    check_prompts(prompts)
    queue = LocalQueue[GenerationRequest, Generation](
        [
            GenerationRequest(prompt, seed, sampling)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
    )
    engine.serve(queue)
    return queue.results()


def check_no_images(requests: Iterable[GenerationRequest]) -> None:
    """Raise ConfigError for a request with images, of an engine that was built without them."""
    if shown := next((request.images for request in requests if request.images), None):
        raise ConfigError(
            f"a prompt shows {len(shown)} images, and the engine was built without: set "
            "images.column, and give "
            "build_engine images: ${images}"
        )


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError for a prompt without tokens."""
    if empty := [row for row, prompt in enumerate(prompts) if not len(prompt)]:
        raise ValueError(f"prompts {empty} have no tokens: there is nothing to go on from")
