"""Drafts of the next tokens of a row, looked up in what is known of its prompt: prompt lookup
(github.com/apoorvumang/prompt-lookup-decoding) and reuse of earlier rollouts.

A row's last tokens are looked for in its prompt, in responses to the same prompt that are under way,
and in those of earlier steps; what came after them there is the draft. A draft is a guess and no
more: the engine takes a drafted token only where it draws that token itself, so that no sample
depends on what is remembered here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

NGRAMS = (3, 2)
"""Numbers of last tokens that are looked for, the first that is found."""
_MOST_TOKENS = 2**22  # of all remembered responses, 4 bytes each
_MOST_RESPONSES = 32  # that are remembered of a prompt
_FIRST = 3  # tokens of a row's first draft


class NgramIndex:
    """The place after each n-gram of some sequences, the latest one."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}

    def add(self, sequence: Sequence[int], first: int = 0) -> None:
        """Note the n-grams before the tokens of a sequence from number ``first`` on."""
        for place in range(first, len(sequence)):
            for length in NGRAMS:
                if place >= length:
                    key = tuple(sequence[place - length : place])
                    self._places[key] = (sequence, place)

    def after(self, sequence: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that came after the last tokens of ``sequence``; none where
        these are new.
        """
        for length in NGRAMS:
            found = self._places.get(tuple(sequence[-length:]))
            if found is not None:
                earlier, place = found
                return list(earlier[place : place + most])
        return []


class EarlierResponses:
    """Responses of earlier steps by prompt, as many as fit; the prompt that was not sampled from
    for longest is forgotten first.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._responses: OrderedDict[tuple[int, ...], list[array[int]]] = OrderedDict()

    def of(self, prompt: tuple[int, ...]) -> Sequence[Sequence[int]]:
        """Return the responses to a prompt, the latest last, each after the end of what it
        continued.
        """
        return self._responses.get(prompt, ())

    def add(self, prompt: tuple[int, ...], response: Sequence[int]) -> None:
        """Remember a response to a prompt, with the last tokens before it."""
        kept = self._responses.setdefault(prompt, [])
        self._responses.move_to_end(prompt)
        kept.append(array("i", response))
        self._tokens += len(response)
        if len(kept) > _MOST_RESPONSES:
            self._tokens -= len(kept.pop(0))
        while self._tokens > self._most_tokens:
            _, forgotten = self._responses.popitem(last=False)
            self._tokens -= sum(map(len, forgotten))


@dataclass(slots=True)
class _DraftedRow:
    """A row under way: its tokens so far, and the index of what is known of its prompt."""

    index: NgramIndex
    sequence: MutableSequence[int]
    next_draft: int = _FIRST
    """Tokens of the next draft: more after one that was taken, fewer after one that was not."""


class BatchDrafts:
    """Drafts for the rows of one batch."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        begun: Sequence[int],
        earlier: EarlierResponses,
        most: int,
    ) -> None:
        """``begun`` are the numbers of tokens at the end of each prompt that belong to its
        response. A draft has at most ``most`` tokens.
        """
        self._earlier = earlier
        self._most = most
        self._prompts: list[tuple[int, ...]] = []
        self._starts = [len(prompt) for prompt in prompts]
        self._rows: list[_DraftedRow] = []
        indices: dict[tuple[int, ...], NgramIndex] = {}
        for prompt, count in zip(prompts, begun, strict=True):
            key = tuple(prompt[: len(prompt) - count])
            if key not in indices:
                indices[key] = NgramIndex()
                for response in earlier.of(key):
                    indices[key].add(response)
                indices[key].add(key)
            row = _DraftedRow(indices[key], list(prompt))
            row.index.add(row.sequence, len(key))
            self._prompts.append(key)
            self._rows.append(row)

    def draft(self, row: int, room: int) -> list[int]:
        """Return a draft of the next tokens of a row, at most ``room`` of them."""
        own = self._rows[row]
        most = min(own.next_draft, self._most, room)
        if most <= 0:
            return []
        return own.index.after(own.sequence, most)

    def add(self, row: int, tokens: Sequence[int], *, drafted: int) -> None:
        """Append the tokens that a pass has given a row, the first ones of them from a draft of
        ``drafted``.
        """
        own = self._rows[row]
        before = len(own.sequence)
        own.sequence.extend(tokens)
        own.index.add(own.sequence, before)
        if drafted:
            own.next_draft = 2 * len(tokens) - 1

    def remember(self) -> None:
        """Remember the responses for later batches."""
        for key, start, row in zip(self._prompts, self._starts, self._rows, strict=True):
            self._earlier.add(key, row.sequence[max(0, start - max(NGRAMS)) :])
