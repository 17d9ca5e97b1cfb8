"""Token ids of an episode's prompts and observations, and the positions of images in them.

``<image>`` in a row's own prompt, or ``{type: image}``, stands for an image of the row. An
environment's images are in the parts of a message's content. The image processor counts the tokens
of each image.
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


class InvalidAnswer(Exception):
    """An answer of the environment that cannot be used: the episode fails, with the message as
    the reason.
    """


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image among the tokens of a row."""

    start: int
    """Index of its first token."""
    image: Image
    observed: bool
    """True for an image of the environment, False for one of the row's prompt."""

    def moved(self, by: int) -> ShownImage:
        """Return the image with its first token ``by`` tokens later."""
        return ShownImage(self.start + by, self.image, self.observed)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as tokens."""

    ids: list[int]
    text: Text
    """The text as the chat template takes it: with placeholders for images, and without their
    files."""
    images: list[ShownImage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EpisodeTexts:
    """Encodes the texts of one episode. Its methods raise InvalidAnswer for texts and images
    that cannot be used.
    """

    tokenizer: Tokenizer
    processor: ImageProcessor | None
    """None: the model reads texts alone."""
    images: tuple[Image, ...] = ()
    """Images of the row's prompt."""

    def own_prompt(self, text: Text, ids: list[int]) -> Encoded:
        """Return the row's prompt, which ``encode_prompts`` has encoded."""
        if self.processor is None:
            return Encoded(ids, text)
        images = self._shown_images(
            self.processor, ids, [_PlacedImage(image, False) for image in self.images]
        )
        if images:
            text = marked(text, self.processor.family.placeholder)
        return Encoded(ids, text, images)

    def prompt(self, text: Text, tools: Sequence[Mapping[str, Any]]) -> Encoded:
        """Return a prompt that the environment gives. It shows all images of the row, or none of
        them.
        """
        plain, files = self._split_images(text, marks=bool(self.images))
        own_places = files.count(None)
        if self.processor is not None and own_places not in (0, len(self.images)):
            raise InvalidAnswer(
                f"gave a prompt with {own_places} places for images of its row, which has "
                f"{len(self.images)}: expected as many, or none"
            )
        own_images = iter(self.images)
        images: list[_PlacedImage] = []
        for file in files:
            if file is None:
                images.append(_PlacedImage(next(own_images), False))
            else:
                images.append(_PlacedImage(file, True))
        try:
            ids = self.tokenizer.encode(plain, tools)
        except DataError as error:
            raise InvalidAnswer(f"gave a prompt that no answer can follow: {error}") from error
        return self._expanded(ids, images, plain)

    def observation(
        self,
        began: Text,
        new: Text | None,
        tools: Sequence[Mapping[str, Any]],
        last: int,
    ) -> Encoded:
        """Return the tokens that an observation ``new`` adds to a row whose prompt was ``began``,
        and whose last sampled token is ``last``.
        """
        if isinstance(began, str):
            if new is not None and not isinstance(new, str):
                raise InvalidAnswer(
                    "gave messages where the episode began with a string: expected a string"
                )
            ids = self.tokenizer.encode_more(new) if new else []
            return self._expanded(ids, [], new or "")
        plain, files = self._split_images(messages_of(new), marks=False)
        assert not isinstance(plain, str)
        images: list[_PlacedImage] = []
        for file in files:
            if file is None:
                raise InvalidAnswer(
                    "gave an observation with a place for an image, and no image: expected {type: "
                    "image, image: ...}"
                )
            images.append(_PlacedImage(file, True))
        try:
            ids = self.tokenizer.after_turn(began, plain, tools, last)
        except DataError as error:
            raise InvalidAnswer(f"gave an observation that is no chat: {error}") from error
        return self._expanded(ids, images, plain)

    def _split_images(self, text: Text, *, marks: bool) -> tuple[Text, list[Image | None]]:
        """Return a text with placeholders for images, and the image of each of them: None for one
        of the row.

        With ``marks``, ``<image>`` in a text is a placeholder.
        """
        if isinstance(text, str):
            if self.processor is None or not marks:
                return text, []
            return marked(text, self.processor.family.placeholder), [None] * text.count(MARK)
        try:
            files = [file_of(part) for message in text for part in _content_parts(message)]
            if self.processor is None:
                if any(file is not None for file in files):
                    raise ImageError(
                        "it shows an image: set images.observations=true for a model that sees them"
                    )
                return text, []
            plain: Text = [_without_files(message) for message in text]
            if marks:
                plain = marked(plain, self.processor.family.placeholder)
        except ImageError as error:
            raise InvalidAnswer(f"gave messages that cannot be shown: {error}") from error
        return plain, _images_of(text, marks=marks)

    def _expanded(self, ids: list[int], images: Sequence[_PlacedImage], text: Text) -> Encoded:
        """Return a text with as many placeholder tokens for each image as it has tokens."""
        if self.processor is None:
            return Encoded(ids, text)
        files = [placed.image for placed in images]
        try:
            ids = self.processor.expand(ids, files)
            self.processor.check(files)
        except ImageError as error:
            raise InvalidAnswer(f"gave images that cannot be shown: {error}") from error
        return Encoded(ids, text, self._shown_images(self.processor, ids, images))

    @staticmethod
    def _shown_images(
        processor: ImageProcessor, ids: list[int], images: Sequence[_PlacedImage]
    ) -> list[ShownImage]:
        """Return the images with their positions among ``ids``."""
        token_counts = [processor.tokens(placed.image) for placed in images]
        places = image_places(ids, processor.image_token, token_counts)
        return [
            ShownImage(place.start, placed.image, placed.observed)
            for place, placed in zip(places, images, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _PlacedImage:
    """The image of a placeholder."""

    image: Image
    observed: bool
    """True for an image of the environment, False for one of the row's prompt."""


def messages_of(text: Text | None) -> list[Message]:
    """Return a text as chat messages: a string is a message of the user."""
    if text is None:
        return []
    if isinstance(text, str):
        return [{"role": "user", "content": text}]
    return list(text)


def joined(text: Text, more: Text | None) -> Text:
    """Return a text followed by another. InvalidAnswer for messages after a string."""
    if not more:
        return text
    if not isinstance(text, str):
        return [*text, *messages_of(more)]
    if isinstance(more, str):
        return text + more
    raise InvalidAnswer("gave messages where the episode began with a string: expected a string")


def _content_parts(message: Message) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content; none where that is a string."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return []
    return [part for part in content if isinstance(part, Mapping)]


def _without_files(message: Message) -> Message:
    """Return the message with ``{type: image}`` in place of each image."""
    parts = _content_parts(message)
    if not parts:
        return message
    plain = [{"type": "image"} if part.get("type") == "image" else part for part in parts]
    return {**message, "content": plain}


def _images_of(text: Sequence[Message], *, marks: bool) -> list[Image | None]:
    """Return the image of each placeholder in messages, in order; None for one of the row."""
    images: list[Image | None] = []
    for message in text:
        content = message.get("content")
        parts = _content_parts(message)
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        for part in parts:
            if part.get("type") == "image":
                file = file_of(part)
                images.append(None if file is None else Image(file))
            elif marks:
                marks_in_text = str(part.get("text") or "").count(MARK)
                images += [None] * marks_in_text
    return images
