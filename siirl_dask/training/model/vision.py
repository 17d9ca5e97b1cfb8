"""Images in a network's pass: a model's tower runs once for each image of a micro-batch, and what
it makes of an image takes the place of the embeddings of the tokens that stand for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from siirl_dask.errors import ConfigError
from siirl_dask.images.families import FAMILIES, ImageFamily
from siirl_dask.images.features import ImageFeatures, image_features
from siirl_dask.training.batch_images import BatchImages, ImageInputs
from siirl_dask.training.model.row_layout import decoder_of

if TYPE_CHECKING:
    from siirl_dask.images.processor import Pixels

_INNER = "model."  # in names of parameters: the part of a model below its head


def family_of_model(model: PreTrainedModel) -> ImageFamily | None:
    """Return the family of a model that sees images, or of its part below the head; None for any
    other.
    """
    return FAMILIES.get(getattr(model.config, "model_type", ""))


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the tower of a model that sees images, or of its part below the head; None for any
    other.
    """
    family = family_of_model(model)
    if family is None:
        return None
    return model.base_model.get_submodule(family.tower.removeprefix(_INNER))


def below_head(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model below its head: its decoder, with the tower of one that sees
    images.
    """
    below: Any = decoder_of(model) if tower_of(model) is None else model.base_model
    return below  # type: ignore[no-any-return]


def tower_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the model's tower; none for a model without. ConfigError for a tower
    without a list.
    """
    family = family_of_model(model)
    tower = tower_of(model)
    if family is None or tower is None:
        return []
    layers = getattr(tower, family.blocks, None)
    if not isinstance(layers, Iterable):
        raise ConfigError(
            f"{type(tower).__name__} has no layers {family.blocks!r} to shard or compute again one "
            "by one"
        )
    return list(layers)


def decoder_inputs(
    model: PreTrainedModel,
    ids: Tensor,
    images: BatchImages | None,
    inputs: ImageInputs,
    *,
    always: bool,
) -> dict[str, Any]:
    """Return the decoder's arguments for the tokens of a micro-batch, with the features of its
    images among them. [1, T] ids.

    With ``always`` the tower runs also where there are no images, and adds exactly 0: ranks that
    shard it must run alike, and each parameter must get a gradient on all of them or on none.
    """
    embeddings: Tensor = model.get_input_embeddings()(ids)
    if images is not None:
        return _with_images(embeddings, image_features(model, inputs.pixels(images.images)), images)
    if always:
        found = image_features(model, [inputs.blank])
        embeddings = embeddings + 0.0 * sum(
            each.sum() for one in found for each in (one.embeddings, *one.levels)
        )
    return {"inputs_embeds": embeddings}


def _with_images(
    embeddings: Tensor, found: Sequence[ImageFeatures], images: BatchImages
) -> dict[str, Any]:
    device = embeddings.device
    places = images.places.to(device)
    features = images.features.to(device)
    shown = _pick([one.embeddings for one in found], features).to(embeddings.dtype)
    arguments: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, places, shown[None])}
    levels_of_images = zip(*(one.levels for one in found), strict=True)
    levels = [_pick(level, features) for level in levels_of_images]
    if levels:
        stands_for_image = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=device)
        stands_for_image[0, places] = True
        arguments |= {"visual_pos_masks": stands_for_image, "deepstack_visual_embeds": levels}
    return arguments


def _pick(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Pick rows of tensors, one after the other; several may pick the same one. [n, D] each, [N] ->
    [N, D].

    An embedding adds up their gradients in the same order at any time, which indexing does not on a
    GPU.
    """
    return embedding(rows, torch.cat([*tensors]))


def plain_arguments(ids: Tensor, pixels: Sequence[Pixels], image_token: int) -> dict[str, Any]:
    """Return the arguments of a model's own forward for one row of an image-text model, all of
    whose placeholders stand for images. [1, T] ids.
    """
    if not pixels:
        return {}
    return {
        "pixel_values": torch.cat([each.values for each in pixels]).to(ids.device),
        "image_grid_thw": torch.tensor([each.grid for each in pixels], device=ids.device),
        "mm_token_type_ids": (ids == image_token).int(),
    }
