"""Puts images into a model's input: what its tower makes of their pixels, at the places that a
prompt keeps for them.

Engine, policy, critic and reference all go by these functions. A placeholder that was sampled is an
ordinary token: only the first placeholders of a row, as many as its images have tokens, stand for
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from siirl_dask.errors import DataError

if TYPE_CHECKING:
    from siirl_dask.images.processor import Pixels

Grid = tuple[int, int, int]
"""Patches of an image: in time, in height, in width."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """An image as a model's tower makes it."""

    embeddings: Tensor
    """[n, H], of the image's n tokens."""
    levels: tuple[Tensor, ...] = ()
    """[n, H] each: added to the hidden states after the first layers (DeepStack,
    arXiv:2406.04334); most have none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.levels))


def image_features(model: Any, pixels: Sequence[Pixels]) -> list[ImageFeatures]:
    """Run the tower of an image-text model of transformers once over some images. Returns the
    features of each.

    Gradients flow where they are on.
    """
    if not pixels:
        return []
    values = torch.cat([each.values for each in pixels])
    grids = torch.tensor([each.grid for each in pixels])
    device = model.get_input_embeddings().weight.device
    output = model.get_image_features(values.to(device), grids.to(device), return_dict=True)
    counts = [len(embeddings) for embeddings in output.pooler_output]
    levels = []
    for level in getattr(output, "deepstack_features", None) or ():
        levels.append(_by_image(level, counts))
    features = []
    for index, embeddings in enumerate(output.pooler_output):
        features.append(ImageFeatures(embeddings, tuple(level[index] for level in levels)))
    return features


def _by_image(level: Tensor | Sequence[Tensor], counts: Sequence[int]) -> Sequence[Tensor]:
    """Return the features of each image, of ``counts`` tokens; transformers before 5.18 gives
    all in one tensor.
    """
    if isinstance(level, Tensor):
        return torch.split(level, [*counts])
    return level


def image_places(ids: Sequence[int], image_token: int, counts: Sequence[int]) -> list[range]:
    """Return the places of each image's tokens in a row's ids: the first run of placeholders is the
    first image's.

    DataError unless each of the first runs has as many placeholders as its element of ``counts``.
    """
    places: list[range] = []
    at = 0
    for number, count in enumerate(counts):
        try:
            at = ids.index(image_token, at)
        except ValueError:
            raise DataError(
                f"a prompt has placeholders of {number} images, and {len(counts)} images are "
                "given: expected as many"
            ) from None
        if any(token != image_token for token in ids[at : at + count]) or len(ids) < at + count:
            found = next(
                (n for n, token in enumerate(ids[at:]) if token != image_token), len(ids) - at
            )
            raise DataError(
                f"image {number} of a prompt has {count} tokens and the prompt keeps {found} "
                "places for it: it was "
                "encoded with other settings of images, or with another model's processor"
            )
        places.append(range(at, at + count))
        at += count
    return places


def check_places(ids: Sequence[int], image_token: int, places: Sequence[range]) -> None:
    """Raise DataError unless a row's ids have placeholders at all of the places."""
    for number, place in enumerate(places):
        if any(token != image_token for token in ids[place.start : place.stop]) or place.stop > len(
            ids
        ):
            raise DataError(
                f"image {number} of a row has {len(place)} tokens, and there are others at place "
                f"{place.start}: it was "
                "encoded with other settings of images, or with another model's processor"
            )


def has_image_positions(model: Any) -> bool:
    """Return whether the model's tokens have positions in three dimensions (as in Qwen2-VL,
    arXiv:2409.12191).
    """
    return hasattr(_inner(model), "get_rope_index")


def positions(
    model: Any,
    ids: Sequence[int],
    places: Sequence[range],
    grids: Sequence[Grid],
) -> Tensor:
    """Return the rotary positions (in time, height, width) of one row by itself. [T] ids -> [3, T]
    int64, on the CPU.

    Text counts from 0 in all three, and so does everything where the model has no positions for
    images. DataError for two images without a token between them, which the model would take for
    one.
    """
    if not places or not has_image_positions(model):
        return torch.arange(len(ids)).expand(3, -1)
    if any(before.stop == after.start for before, after in pairwise(places)):
        raise DataError(
            "two images of a prompt have no token between them: expected one, as the chat template "
            "puts it"
        )
    kinds = torch.zeros(1, len(ids), dtype=torch.int32)
    for place in places:
        kinds[0, place.start : place.stop] = 1
    found: Tensor = _inner(model).get_rope_index(
        torch.tensor([[*ids]]), mm_token_type_ids=kinds, image_grid_thw=torch.tensor([*grids])
    )[0]
    return found[:, 0]


def _inner(model: Any) -> Any:
    """Return the part of a model below its head."""
    return getattr(model, "model", model)
