"""Makes conversations of exact token ids out of an agent's requests, and rows for training out of
these.

A request continues an earlier one when its history is that one's history and answer, and more. Then
the ids that are there stay as they are, and only what the chat template puts between the turns is
added. A history that leads back to an answer that was continued already, or to none, begins another
row; what leads back to an answer begins with its ids.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, TypeAlias

from siirl_dask.errors import ConfigError
from siirl_dask.rollout.endpoint.messages import digest
from siirl_dask.rollout.endpoint.refusals import Refusal, over_limit, too_long, unauthorized
from siirl_dask.rollout.endpoint.requests import Asked
from siirl_dask.rollout.engine import (
    FinishReason,
    Generation,
    GenerationRequest,
    Sampling,
    Tokenizer,
)

History: TypeAlias = str | tuple[str, ...]
"""The past that a request leads back to: a text, or digests of the tools and of each message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of an episode."""

    prompt: int
    """Most tokens before the first answer of a row."""
    response: int
    """Most tokens of a row from its first answer on."""
    context: int | None = None
    """Most tokens that the model reads; None where it does not say."""
    requests: int = 64
    segments: int = 4

    def with_response(self, limit: int) -> Bounds:
        """Return the bounds of a row that has a limit of its own."""
        return replace(self, response=min(self.response, limit))


@dataclass(slots=True, eq=False)
class Segment:
    """A row to be: a prompt, and a response in which answers and what stood between them follow
    one another.
    """

    prompt: list[int]
    seed: int
    order: tuple[Any, ...]
    """Place among the rows of the episode. Requests that were under way together are in the
    order of their prompts."""
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    """Spans of the answers in ``response``."""
    finish: FinishReason = FinishReason.STOP
    """Why the last answer ended."""
    busy: bool = False
    """Whether a request is under way that continues it."""

    @property
    def ids(self) -> list[int]:
        """The prompt and the response."""
        return [*self.prompt, *self.response]


@dataclass(frozen=True, slots=True)
class _Place:
    """An answer that a request may lead back to: ``length`` tokens of the response up to its
    end.
    """

    history: History
    segment: Segment
    length: int


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A request that is being served."""

    asked: Asked
    segment: Segment
    between: list[int]
    """Tokens that come between the segment's latest answer and this one."""
    request: GenerationRequest


class Conversation:
    """The requests of one episode. Any thread may call its methods; the tokenizer is used by one
    at a time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        own_prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
        bounds: Bounds,
    ) -> None:
        """``own_prompt`` is the prompt of the episode's row: a conversation that begins with it is
        sampled with ``seed`` itself, as a node that generates would; others with a seed of their
        prompt.
        """
        self._tokenizer = tokenizer
        self._own_prompt = [*own_prompt]
        self._seed = seed
        self._sampling = sampling
        self._bounds = bounds
        self._segments: list[Segment] = []
        self._places: list[_Place] = []
        self._under_way = 0
        self._wave = 0
        self._closed = False
        self.requests = 0
        """Requests that were let in."""
        self.tool_calls = 0
        """Tool calls in answers so far."""
        self._lock = threading.Lock()

    def begin(self, asked: Asked) -> SampledTurn:
        """Return what the engine is to sample for a request. Refusal where it does not fit into
        the bounds.
        """
        with self._lock:
            if self._closed:
                raise unauthorized()
            if self.requests >= self._bounds.requests:
                raise over_limit(
                    f"the episode has had {self.requests} requests, as many as it may "
                    "(endpoint.max_requests)"
                )
            turn = self._turn(asked)
            self.requests += 1
            self._under_way += 1
            turn.segment.busy = True
            if turn.segment not in self._segments:
                self._segments.append(turn.segment)
            return turn

    def finish(
        self,
        turn: SampledTurn,
        generation: Generation,
        version: int,
        history: History,
    ) -> None:
        """Record an answer: what was sampled, by which weights, and the history that leads back
        to it.
        """
        with self._lock:
            self._under_way -= 1
            segment = turn.segment
            segment.busy = False
            if self._closed:
                return
            start = len(segment.response) + len(turn.between)
            count = len(generation.token_ids)
            segment.response += [*turn.between, *generation.token_ids]
            segment.logprobs += [*[0.0] * len(turn.between), *generation.logprobs]
            segment.mask += [*[False] * len(turn.between), *[True] * count]
            segment.versions += [*[-1] * len(turn.between), *[version] * count]
            segment.turns.append((start, start + count))
            segment.finish = generation.finish_reason
            self._places.append(_Place(history, segment, len(segment.response)))

    def abandon(self, turn: SampledTurn) -> None:
        """Forget a request whose answer nobody has read."""
        with self._lock:
            self._under_way -= 1
            turn.segment.busy = False
            if not turn.segment.turns:
                self._segments.remove(turn.segment)

    def close(self) -> list[Segment]:
        """Let no more requests in; return the episode's rows, in order."""
        with self._lock:
            self._closed = True
            return sorted(
                (segment for segment in self._segments if segment.turns),
                key=lambda segment: segment.order,
            )

    def unasked(self) -> Segment:
        """Return the row of an episode in which nothing was asked: its prompt."""
        return Segment(self._own_prompt, self._seed, ())

    def _turn(self, asked: Asked) -> SampledTurn:
        history = history_of(asked)
        place = max(
            (place for place in self._places if leads_to(history, place.history)),
            key=lambda place: (
                len(place.history),
                not place.segment.busy,
                place.length == len(place.segment.response),
            ),
            default=None,
        )
        between = None if place is None else self._between(asked, place)
        if place is None or between is None:
            return self._opening(asked, self._encoded(asked))
        segment = place.segment
        if segment.busy or place.length < len(segment.response):
            return self._opening(
                asked, [*segment.prompt, *segment.response[: place.length], *between]
            )
        return self._request(asked, segment, between)

    def _between(self, asked: Asked, place: _Place) -> list[int] | None:
        """Return the ids that a request adds to those of the answer that it leads back to; None
        where the chat template cannot tell them.
        """
        known = len(place.history)
        if not asked.chat:
            return self._tokenizer.encode_more(asked.prompt[known:])
        answered = known - 1  # the first digest is that of the tools
        new = asked.messages[answered:]
        last = place.segment.response[place.length - 1]
        if any(message["role"] == "assistant" for message in new):
            return None  # words that the policy did not say would be put into its mouth
        try:
            return self._tokenizer.after_turn(
                asked.messages[: answered - 1], new, asked.tools, last
            )
        except ConfigError:
            return None

    def _encoded(self, asked: Asked) -> list[int]:
        """Return the ids of a request that leads back to no answer. Refusal where the chat
        template refuses it.
        """
        if not asked.chat:
            return self._tokenizer.encode(asked.prompt)
        if asked.messages[-1]["role"] == "assistant":
            reason = (
                "the last message is the assistant's: expected one that the assistant is to answer"
            )
            raise Refusal(400, reason, field="messages", code="invalid_value")
        try:
            return self._tokenizer.encode(asked.messages, asked.tools)
        except Exception as error:  # a template raises what it likes
            reason = (
                f"the model's chat template refuses the messages: {type(error).__name__}: {error}"
            )
            raise Refusal(400, reason, field="messages", code="invalid_value") from error

    def _opening(self, asked: Asked, prompt: list[int]) -> SampledTurn:
        """Return the first turn of another row."""
        bounds = self._bounds
        if len(prompt) > bounds.prompt:
            raise too_long(
                f"the conversation has {len(prompt)} tokens before its first new answer, more than "
                f"{bounds.prompt} (data.max_prompt_length)"
            )
        if not prompt:
            raise Refusal(
                400,
                "the prompt has no tokens: expected at least one",
                field="prompt",
                code="invalid_value",
            )
        if len(self._segments) >= bounds.segments:
            raise over_limit(
                f"the episode has {len(self._segments)} rows, as many as it may "
                "(endpoint.max_segments), and this request does not continue the latest answer of "
                "one: its history was rewritten, or branches off"
            )
        again = sum(segment.prompt == prompt for segment in self._segments)
        if not self._under_way:
            self._wave += 1
        seed = self._seed
        if again or prompt != self._own_prompt:
            seed = mixed_seed(self._seed, prompt, again)
        return self._request(asked, Segment(prompt, seed, (self._wave, prompt, again)), [])

    def _request(self, asked: Asked, segment: Segment, between: list[int]) -> SampledTurn:
        """Return a turn with as many tokens as there is room for. Refusal where there is none."""
        ids = [*segment.ids, *between]
        begun = len(segment.response) + len(between)
        room = self._bounds.response - begun
        if self._bounds.context is not None:
            room = min(room, self._bounds.context - len(ids))
        if room < 1:
            raise too_long(
                f"the conversation has {len(ids)} tokens, {begun} of them since its first answer: "
                "there is no room for another answer "
                f"(rollout.max_response_length={self._bounds.response}, and the model's own length)"
            )
        wanted = min(room, self._sampling.max_tokens, asked.max_tokens or room)
        sampling = replace(self._sampling, max_tokens=wanted)
        return SampledTurn(
            asked, segment, between, GenerationRequest(ids, segment.seed, sampling, begun)
        )


def history_of(asked: Asked, answer: dict[str, Any] | None = None, text: str = "") -> History:
    """Return what a request leads back to; with what was answered, a message and its text, what
    leads back to that.
    """
    if not asked.chat:
        return asked.prompt + text
    said = [*asked.messages]
    if answer is not None:
        said.append(answer)
    return (json.dumps(asked.tools, sort_keys=True), *map(digest, said))


def leads_to(history: History, earlier: History) -> bool:
    """Return whether a history is an earlier one and more."""
    if type(history) is not type(earlier) or len(history) <= len(earlier):
        return False
    return history[: len(earlier)] == earlier


def mixed_seed(seed: int, prompt: Sequence[int], again: int) -> int:
    """Return a 63-bit seed for a prompt of an episode, another one each time that the prompt is
    sampled ``again``.
    """
    key = f"{seed}/{again}/{' '.join(map(str, prompt))}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
