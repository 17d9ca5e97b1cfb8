"""Makes what a model of transformers reads of prompts with images: features in place of
embeddings, and positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siirl_dask.errors import DataError
from siirl_dask.images import Image
from siirl_dask.images.features import (
    ImageFeatures,
    check_places,
    has_image_positions,
    image_features,
    image_places,
    positions,
)
from siirl_dask.images.processor import ImageProcessor, Pixels
from siirl_dask.rollout.engine import GenerationRequest

_PATCHES = 2**14  # of images that go through the tower together
_KEPT = 2**28  # bytes of features that are kept for later batches


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt, as a model reads them. Two are equal if they are the same
    object.
    """

    places: Sequence[range]
    """Places of each image's tokens in the prompt."""
    features: Sequence[ImageFeatures]
    positions: Tensor
    """[3, T], of all tokens of the prompt."""

    @property
    def shift(self) -> int:
        """How far the positions of what follows the prompt are ahead of the places."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]


def places_of(request: GenerationRequest, processor: ImageProcessor) -> list[range]:
    """Return the places of each image's tokens in a request's prompt. DataError where they are not
    as many.

    What was sampled shows no image, whatever tokens it has.
    """
    if request.image_starts is not None:
        return _checked_places(request, processor, request.image_starts)
    given = list(request.prompt[: len(request.prompt) - request.begun])
    counts = [*map(processor.tokens, request.images)]
    places = image_places(given, processor.image_token, counts)
    if (there := given.count(processor.image_token)) != sum(counts):
        raise DataError(
            f"a prompt keeps {there} places for tokens of images, and its {len(counts)} images "
            f"have {sum(counts)}: expected as many; nodes that sample need the column images"
        )
    return places


def _checked_places(
    request: GenerationRequest, processor: ImageProcessor, starts: Sequence[int]
) -> list[range]:
    counts = map(processor.tokens, request.images)
    prompt = request.prompt
    places = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    check_places(prompt, processor.image_token, places)
    first = len(prompt) - request.begun
    shown = sum(len(place) for place in places if place.start < first)
    if (there := list(prompt[:first]).count(processor.image_token)) != shown:
        raise DataError(
            f"a prompt keeps {there} places for tokens of images, and its images have {shown}: "
            "expected as many; nodes that play need the column images"
        )
    return places


def collapsed(ids: Sequence[int], places: Sequence[range]) -> list[int]:
    """Return a prompt's ids with one placeholder for each image, in its first place; those that
    were sampled stay.
    """
    gone = {at for place in places for at in place[1:]}
    return [token for at, token in enumerate(ids) if at not in gone]


class PromptImageReader:
    """Reads the images of requests for a model. The tower runs once for an image, until
    ``forget``.
    """

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        self._model = model
        self._processor = processor
        self._known: dict[str, ImageFeatures] = {}

    @torch.inference_mode()
    def read(self, requests: Sequence[GenerationRequest]) -> list[PromptImages | None]:
        """Return the images of each request, None for one without; requests that are alike get
        the same object.
        """
        shown = {
            self._processor.identity(image): image
            for request in requests
            for image in request.images
        }
        features = self._features(shown)
        made: dict[tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]], PromptImages] = {}
        found: list[PromptImages | None] = []
        for request in requests:
            names = tuple(map(self._processor.identity, request.images))
            places = places_of(request, self._processor)
            key = tuple(request.prompt), names, tuple(place.start for place in places)
            if names and key not in made:
                made[key] = self._read(request, places, [features[name] for name in names])
            found.append(made.get(key))
        return found

    def forget(self) -> None:
        """Forget the features of all images: others come of new weights."""
        self._known.clear()

    def _read(
        self,
        request: GenerationRequest,
        places: Sequence[range],
        features: Sequence[ImageFeatures],
    ) -> PromptImages:
        grids = [self._processor.grid(image) for image in request.images]
        return PromptImages(places, features, positions(self._model, request.prompt, places, grids))

    def _features(self, images: Mapping[str, Image]) -> dict[str, ImageFeatures]:
        """Return the features of images by their identity."""
        new = [name for name in images if name not in self._known]
        self._processor.bring(images[name] for name in new)
        names: list[str] = []
        pixels: list[Pixels] = []
        for name in new:
            names.append(name)
            pixels.append(self._processor.pixels(images[name]))
            if name == new[-1] or sum(len(each.values) for each in pixels) >= _PATCHES:
                self._known |= zip(names, image_features(self._model, pixels), strict=True)
                names = []
                pixels = []
        found = {name: self._known[name] for name in images}
        if sum(each.nbytes for each in self._known.values()) > _KEPT:
            self._known = dict(found)
        return found


def inputs_with_images(
    model: Any,
    tokens: Tensor,
    positions: Tensor,
    images: Sequence[PromptImages | None],
) -> dict[str, Any]:
    """Return the arguments of a decoder's first pass over prompts, some of them with images.

    ``tokens`` and ``positions``, those of text, are [B, T] with padding before the shorter prompts.
    """
    embeddings: Tensor = model.get_input_embeddings()(tokens)
    visual = torch.zeros_like(tokens, dtype=torch.bool)
    positions = positions.expand(3, -1, -1).clone()
    for row, shown in enumerate(images):
        if shown is not None:
            begin = tokens.shape[1] - shown.positions.shape[1]
            positions[:, row, begin:] = shown.positions.to(positions.device)
            for place in shown.places:
                visual[row, begin + place.start : begin + place.stop] = True
    features = [of_image for shown in images if shown is not None for of_image in shown.features]
    embeddings[visual] = torch.cat([each.embeddings for each in features]).to(embeddings.dtype)
    given: dict[str, Any] = {
        "inputs_embeds": embeddings,
        "position_ids": positions if has_image_positions(model) else positions[0],
    }
    levels = [torch.cat(level) for level in zip(*(each.levels for each in features), strict=True)]
    if levels:
        given |= {"visual_pos_masks": visual, "deepstack_visual_embeds": levels}
    return given
