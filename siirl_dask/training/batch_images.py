"""Images of a micro-batch: which of its tokens stand for which of an image's, and rotary positions
around them.

A micro-batch has each of its images once, however many of its rows show it, so a model's tower runs
once for a group and its features are handed to each row. Pixels are made when the micro-batch is
computed, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from siirl_dask.config import ImagesConfig
from siirl_dask.errors import DataError
from siirl_dask.images import Image, load_processor
from siirl_dask.images.features import check_places, has_image_positions, image_places, positions
from siirl_dask.images.noise import noise
from siirl_dask.training.trainer import ObservedImage, PackedRows

if TYPE_CHECKING:  # it needs an extra, which models of text do without
    from transformers import PreTrainedModel

    from siirl_dask.images.processor import ImageProcessor, Pixels


@dataclass(frozen=True, slots=True)
class BatchImages:
    """Images of a micro-batch, each once, and the N of its T tokens that stand for them."""

    images: tuple[Image, ...]
    places: Tensor
    """[N] int64, ascending: which of the T tokens."""
    features: Tensor
    """[N] int64: which of the tokens of all ``images``, one after the other, each of these is."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Positions and images of neighbouring rows, of T tokens in the order of the batch."""

    images: tuple[Image, ...]
    positions: Tensor
    """[3, T] int64: in time, height and width."""
    features: Tensor
    """[T] int64, as those of ``BatchImages``; -1 at what stands for no image."""

    def select(self, tokens: Tensor) -> tuple[Tensor, BatchImages]:
        """Return positions [3, C] and images of some of the tokens, [C] int64."""
        features = self.features[tokens]
        places = (features >= 0).nonzero().squeeze(1)
        return self.positions[:, tokens], BatchImages(self.images, places, features[places])


@dataclass(frozen=True, slots=True)
class _Begin:
    """Layout of the first P tokens of a row, behind which it shows no image."""

    positions: Tensor
    """[3, P + 1] int64, also of a token of text that follows."""
    features: Tensor
    """[P] int64."""


class ImageInputs:
    """Lays out images in rows for a model, and makes their pixels."""

    def __init__(self, processor: ImageProcessor, model: PreTrainedModel) -> None:
        """``model`` says where its tokens are in time, height and width; it may be without
        weights.
        """
        self._processor = processor
        self._model = model
        self.image_token = processor.image_token
        """Id of the placeholder."""
        self.has_positions = has_image_positions(model)
        """Whether tokens have positions in time, height and width, as those of the Qwen-VL
        models."""

    @classmethod
    def load(
        cls,
        path: str,
        images: ImagesConfig | None,
        model: PreTrainedModel,
    ) -> ImageInputs | None:
        """Return the inputs of the model in the folder ``path``; None where no images are read
        (``images.column``).

        ConfigError for a model that sees no images, or of a family that is not known.
        """
        processor = load_processor(path, images)
        below: Any = model.base_model  # without the head, which a critic drops
        if processor is None:
            return None
        return cls(processor, below)

    def tokens(self, image: Image) -> int:
        """Return the number of the image's tokens, from its header alone."""
        return self._processor.tokens(image)

    @cached_property
    def blank(self) -> Pixels:
        """Pixels of one token, for a pass without images in which the tower runs all the same."""
        image = noise(64, 64, 0)
        from siirl_dask.images.processor import Pixels

        whole = self._processor.pixels(image)
        side = isqrt(len(whole.values) // self._processor.tokens(image))
        return Pixels(whole.values[: side * side], (1, side, side))

    def pixels(self, images: Sequence[Image]) -> list[Pixels]:
        """Return the pixels of each image. DataError for an image that cannot be read."""
        return [self._processor.pixels(image) for image in images]

    def check_given(self, rows: PackedRows) -> None:
        """Raise ValueError for prompts with placeholders in rows whose images were left out
        altogether.
        """
        if rows.images is None and bool((rows.tokens == self.image_token).any()):
            lengths = rows.offsets.diff()
            within = torch.arange(len(rows.tokens)) - rows.offsets[:-1].repeat_interleave(lengths)
            in_prompt = within < rows.prompt_lengths.repeat_interleave(lengths)
            if bool((rows.tokens[in_prompt] == self.image_token).any()):
                raise ValueError(
                    "prompts have places for images, and the rows have no images: a node that "
                    "computes with a model reads the column 'images' where there is one"
                )

    def layout(
        self,
        rows: PackedRows,
        start: int,
        stop: int,
        prompts: Tensor,
    ) -> ImageLayout | None:
        """Lay out the images of the rows from ``start`` to ``stop``; None if they show none.

        ``prompts`` numbers the runs of these rows that have the same prompt, and so the same layout
        of it. DataError for a prompt that has other placeholders than its images have tokens.
        """
        if rows.images is None:
            return None
        shown = [rows.images.groups[group] for group in rows.images.of_row[start:stop].tolist()]
        observed = rows.images.observed[start:stop]
        if not observed:
            observed = [()] * (stop - start)
        self._processor.bring(image for images in shown for image in images)
        begins: dict[Image, int] = {}
        total = 0
        of_prompts = (image for images in shown for image in images)
        for image in dict.fromkeys((*of_prompts, *(one.image for own in observed for one in own))):
            begins[image] = total
            total += self._processor.tokens(image)
        if not begins:
            return None
        first = int(rows.offsets[start])
        found = torch.empty(3, int(rows.offsets[stop]) - first, dtype=torch.int64)
        features = torch.full((found.shape[1],), -1)
        known = None
        last = -1
        for row, (images, own, number) in enumerate(
            zip(shown, observed, prompts.tolist(), strict=True), start
        ):
            begin = int(rows.offsets[row]) - first
            end = int(rows.offsets[row + 1]) - first
            prompt = int(rows.prompt_lengths[row])
            length = prompt
            if own:
                length = end - begin
            if known is None or number != last or own:
                ids = rows.tokens[first + begin : first + begin + length].tolist()
                known = self._begin(
                    ids,
                    prompt,
                    images=images,
                    observed=own,
                    begins=begins,
                    row=row,
                )
                last = number
                if own:
                    last = -1
            found[:, begin : begin + length] = known.positions[:, :-1]
            found[:, begin + length : end] = known.positions[:, -1:] + torch.arange(
                end - begin - length
            )
            features[begin : begin + length] = known.features
        return ImageLayout(tuple(begins), found, features)

    def _begin(
        self,
        ids: list[int],
        prompt: int,
        *,
        images: Sequence[Image],
        observed: Sequence[ObservedImage],
        begins: dict[Image, int],
        row: int,
    ) -> _Begin:
        try:
            shown = self._shown(ids, prompt, images, observed)
        except DataError as error:
            raise DataError(f"row {row} of a batch: {error}") from error
        features = torch.full((len(ids),), -1)
        for place, image in shown:
            features[place.start : place.stop] = torch.arange(
                begins[image], begins[image] + len(place)
            )
        grids = [self._processor.grid(image) for _, image in shown]
        places = [place for place, _ in shown]
        with_text = [*ids, 0]  # any token of text
        return _Begin(positions(self._model, with_text, places, grids), features)

    def _shown(
        self,
        ids: list[int],
        prompt: int,
        images: Sequence[Image],
        observed: Sequence[ObservedImage],
    ) -> list[tuple[range, Image]]:
        """Return the images among a row's ids, of which ``prompt`` come first, with their places,
        in order.

        Placeholders that were sampled stand for none.
        """
        tokens = self._processor.tokens
        token = self.image_token
        own = [(range(one.start, one.start + tokens(one.image)), one.image) for one in observed]
        check_places(ids, token, [place for place, _ in own])
        taken = {at for place, _ in own for at in place}
        others = [-1 if at in taken else one for at, one in enumerate(ids[:prompt])]
        # a prompt that the environment made, without the row's images
        if own and token not in others:
            images = ()
        places = image_places(others, token, [*map(tokens, images)])
        return sorted([*zip(places, images, strict=True), *own], key=lambda pair: pair[0].start)
