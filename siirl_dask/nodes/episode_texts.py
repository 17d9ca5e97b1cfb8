"""Token ids of what an episode's prompts and observations say, and where in them images are shown.

``<image>`` in a row's own prompt, or ``{type: image}``, stands for an image of the row. An environment's images come
with it, in the parts of a message's content. Each takes as many tokens as the model sees of it: the one processor of
images counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from siirl_dask.environments import Message, Text
from siirl_dask.environments.pictures import file_of
from siirl_dask.errors import DataError, ImageError
from siirl_dask.images import Image
from siirl_dask.images.features import image_places
from siirl_dask.images.prompts import MARK, marked
from siirl_dask.rollout import Tokenizer

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor


class Unusable(Exception):
    """An answer of the environment cannot be used: the episode fails, for the reason that this says."""


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image among the tokens of a row."""

    start: int
    """Place of its first token."""
    image: Image
    observed: bool
    """Whether the environment has brought it; the others are the row's."""

    def moved(self, by: int) -> ShownImage:
        """Return the image as it is among other tokens, of which ``by`` come before."""
        return ShownImage(self.start + by, self.image, self.observed)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as tokens."""

    ids: list[int]
    text: Text
    """The text as the chat template takes it: with places for images, and without their files."""
    images: list[ShownImage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EpisodeTexts:
    """Encodes the texts of one episode. Its methods raise Unusable for what cannot be shown."""

    tokenizer: Tokenizer
    processor: ImageProcessor | None
    """None: the model reads texts alone."""
    images: tuple[Image, ...] = ()
    """Images of the row's prompt."""

    def own_prompt(self, text: Text, ids: list[int]) -> Encoded:
        """Return the row's prompt, which ``encode_prompts`` has encoded."""
        if self.processor is None:
            return Encoded(ids, text)
        places = image_places(ids, self.processor.image_token, [*map(self.processor.tokens, self.images)])
        shown = [ShownImage(place.start, image, False) for place, image in zip(places, self.images, strict=True)]
        return Encoded(ids, marked(text, self.processor.family.placeholder) if shown else text, shown)

    def prompt(self, text: Text, tools: Sequence[Mapping[str, Any]]) -> Encoded:
        """Return a prompt that the environment gives. It shows all images of the row, or none of them."""
        plain, given = self._taken(text, marks=bool(self.images))
        own = [image for image in given if image is None]
        if self.processor is not None and len(own) not in (0, len(self.images)):
            raise Unusable(
                f"gave a prompt with {len(own)} places for images of its row, which has {len(self.images)}: expected "
                "as many, or none"
            )
        left = iter(self.images)
        shown = [(next(left), False) if image is None else (image, True) for image in given]
        try:
            ids = self.tokenizer.encode(plain, tools)
        except DataError as error:
            raise Unusable(f"gave a prompt that no answer can follow: {error}") from error
        return Encoded(*self._expanded(ids, shown, plain))

    def observation(self, began: Text, new: Text | None, tools: Sequence[Mapping[str, Any]], last: int) -> Encoded:
        """Return what an observation adds to a row that ``began`` so, and whose last sampled token is ``last``."""
        if isinstance(began, str):
            if new is not None and not isinstance(new, str):
                raise Unusable("gave messages where the episode began with a string: expected a string")
            return Encoded(*self._expanded(self.tokenizer.encode_more(new) if new else [], [], new or ""))
        plain, given = self._taken(messages_of(new), marks=False)
        assert not isinstance(plain, str)
        if None in given:
            raise Unusable(
                "gave an observation with a place for an image, and no image: expected {type: image, image: ...}"
            )
        shown = [(image, True) for image in given if image is not None]
        return Encoded(*self._expanded(self.tokenizer.after_turn(began, plain, tools, last), shown, plain))

    def _taken(self, text: Text, *, marks: bool) -> tuple[Text, list[Image | None]]:
        """Return a text with places for images, and the image of each place: None for one of the row.

        With ``marks``, ``<image>`` in a text is a place.
        """
        if isinstance(text, str):
            if self.processor is None or not marks:
                return text, []
            return marked(text, self.processor.family.placeholder), [None] * text.count(MARK)
        try:
            files = [file_of(part) for message in text for part in _parts(message)]
            if self.processor is None:
                if any(file is not None for file in files):
                    raise ImageError("it shows an image: set images.observations=true for a model that sees them")
                return text, []
            plain = [_without_files(message) for message in text]
            taken = marked(plain, self.processor.family.placeholder) if marks else plain
        except ImageError as error:
            raise Unusable(f"gave messages that cannot be shown: {error}") from error
        return taken, _images_of(text, marks=marks)

    def _expanded(
        self, ids: list[int], shown: Sequence[tuple[Image, bool]], text: Text
    ) -> tuple[list[int], Text, list[ShownImage]]:
        if self.processor is None:
            return ids, text, []
        images = [image for image, _ in shown]
        try:
            expanded = self.processor.expand(ids, images)
            self.processor.check(images)
        except ImageError as error:
            raise Unusable(f"gave images that cannot be shown: {error}") from error
        places = image_places(expanded, self.processor.image_token, [*map(self.processor.tokens, images)])
        return expanded, text, [ShownImage(at.start, *one) for at, one in zip(places, shown, strict=True)]


def messages_of(text: Text | None) -> list[Message]:
    """Return a text as chat messages: a string is a user's."""
    if text is None:
        return []
    return [{"role": "user", "content": text}] if isinstance(text, str) else list(text)


def joined(text: Text, more: Text | None) -> Text:
    """Return two texts as one. Unusable for messages after a string."""
    if not more:
        return text
    if not isinstance(text, str):
        return [*text, *messages_of(more)]
    if isinstance(more, str):
        return text + more
    raise Unusable("gave messages where the episode began with a string: expected a string")


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else []


def _without_files(message: Message) -> Message:
    if not (parts := _parts(message)):
        return message
    return {**message, "content": [{"type": "image"} if part.get("type") == "image" else part for part in parts]}


def _images_of(text: Sequence[Message], *, marks: bool) -> list[Image | None]:
    """Return the image of each place in messages, in order; None for one of the row."""
    found: list[Image | None] = []
    for message in text:
        content = message.get("content")
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else _parts(message):
            if part.get("type") == "image":
                file = file_of(part)
                found.append(None if file is None else Image(file))
            elif marks:
                found += [None] * str(part.get("text") or "").count(MARK)
    return found
