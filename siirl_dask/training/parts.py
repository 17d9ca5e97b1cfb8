"""Parts of models, by the names of parameters: which of them learn where a model sees images, and
which Muon steps; and what is refused with images.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from math import prod

from siirl_dask.config import ImagesConfig, OptimizerName, TrainerConfig, VisionPart
from siirl_dask.errors import ConfigError
from siirl_dask.images.families import FAMILIES, ImageFamily, family_of
from siirl_dask.models.architecture import read_config
from siirl_dask.models.shapes import parameter_shapes
from siirl_dask.training.specs import trainer_spec

_WEIGHT = ".weight"
_OF_LAYERS = re.compile(r"(?:.+\.)?layers\.\d+\..+")
# begins the name of a tower's parameter in every model, but not in all models' files
_INNER = "model."


def is_of(part: VisionPart, name: str, family: ImageFamily) -> bool:
    """Return whether a parameter, by its name in the model or in the model's files, belongs to
    ``part``.
    """
    tower = family.tower.removeprefix(_INNER) + "."
    in_model = name.removeprefix(_INNER)
    in_tower = in_model.startswith(tower)
    projects = False
    if in_tower:
        projects = in_model.removeprefix(tower).split(".")[0] in family.projector
    match part:
        case VisionPart.visual:
            return in_tower
        case VisionPart.encoder:
            if not in_tower:
                return False
            return not projects
        case VisionPart.projector:
            return projects
        case VisionPart.language_model:
            return not in_tower


def stays(name: str, parts: Collection[VisionPart], family: ImageFamily | None) -> bool:
    """Return whether a parameter belongs to any of ``parts``, which do not learn."""
    if family is None:
        return False
    return any(is_of(part, name, family) for part in parts)


def in_tower(name: str, family: ImageFamily | None) -> str | None:
    """Return the last name of the layer that a weight belongs to, ``qkv`` of
    ``visual.blocks.0.attn.qkv.weight``; None unless it is one of the tower's own layers.
    """
    if family is None:
        return None
    blocks = f"{family.tower.removeprefix(_INNER)}.{family.blocks}."
    inside = name.removeprefix(_INNER)
    if not inside.startswith(blocks) or not inside.endswith(_WEIGHT):
        return None
    return inside.removesuffix(_WEIGHT).rpartition(".")[2]


def frozen_parts(
    trainer: TrainerConfig, family: ImageFamily | None, *, sees_images: bool
) -> list[VisionPart]:
    """Return the parts of a model that do not learn: those of ``trainer.freeze``, and a tower
    that nothing runs.
    """
    parts = [*trainer.freeze]
    if family is not None and not sees_images and VisionPart.visual not in parts:
        parts.append(VisionPart.visual)
    return parts


def check_parts(
    trainer: TrainerConfig,
    family: ImageFamily | None,
    path: str,
    *,
    sees_images: bool,
) -> None:
    """Raise ConfigError for options of parts that the model in ``path`` lacks, or that leave
    nothing to learn.
    """
    if family is None and (trainer.freeze or trainer.visual_lr is not None):
        option = (
            f"freeze={[*map(str, trainer.freeze)]}"
            if trainer.freeze
            else f"visual_lr={trainer.visual_lr}"
        )
        raise ConfigError(
            f"trainer.{option}: model.path={path!r} sees no images and has no such parts; leave it "
            "out"
        )
    if family is not None and not sees_images and trainer.visual_lr is not None:
        raise ConfigError(
            f"trainer.visual_lr={trainer.visual_lr}: no images are read (images.column, "
            "images.observations), so nothing of the tower learns"
        )
    learns = {VisionPart.encoder, VisionPart.projector, VisionPart.language_model}
    for part in frozen_parts(trainer, family, sees_images=sees_images):
        learns -= (
            {VisionPart.encoder, VisionPart.projector} if part is VisionPart.visual else {part}
        )
    if not learns:
        unseen = ", and the tower sees no images (images.column)"
        if sees_images:
            unseen = ""
        raise ConfigError(
            f"trainer.freeze={[*map(str, trainer.freeze)]}{unseen}: nothing of the model is left "
            "to learn"
        )


def family_seen(path: str, images: ImagesConfig | None) -> tuple[ImageFamily | None, bool]:
    """Return the family of the model in ``path``, None for one that sees no images, and whether it
    is to see any.

    ConfigError where images are read, and the model sees none or is of an unknown family. A model
    that is not on this machine is checked by the workers.
    """
    config = read_config(path)
    sees = False
    if images is not None:
        sees = images.used
    if sees and config is not None:
        return family_of(config, path), True
    return FAMILIES.get((config or {}).get("model_type", "")), sees


def check_no_split_images(trainer: TrainerConfig, images: ImagesConfig | None) -> None:
    """Raise ConfigError for images in rows, or layers, that several ranks share."""
    if images is None or not images.used:
        return
    if not trainer_spec(trainer.backend).sees_images:
        raise ConfigError(
            f"trainer.backend={trainer.backend} with images.column={images.column!r}: it sees no "
            "images; take trainer.backend=fsdp"
        )
    for option in ("sequence_parallel", "tensor_parallel"):
        ranks = getattr(trainer.fsdp, option)
        if ranks > 1:
            raise ConfigError(
                f"trainer.fsdp.{option}={ranks} with {images.source}: rows that show images are "
                "not split over workers; leave it out (trainer.fsdp.offload and "
                "trainer.gradient_checkpointing save memory)"
            )


def count_frozen(path: str, trainer: TrainerConfig, images: ImagesConfig | None) -> int:
    """Count the parameters of the model in ``path`` that do not learn although there are no
    adapters.
    """
    family, sees = family_seen(path, images)
    parts = frozen_parts(trainer, family, sees_images=sees)
    if trainer.lora.rank or not parts:
        return 0
    return sum(
        prod(shape) for name, shape in parameter_shapes(path).items() if stays(name, parts, family)
    )


def count_matrices(path: str, trainer: TrainerConfig, images: ImagesConfig | None) -> int:
    """Count the parameters of the model in ``path`` that Muon steps."""
    return sum(map(prod, matrix_shapes(path, trainer, images)))


def matrix_shapes(
    path: str, trainer: TrainerConfig, images: ImagesConfig | None
) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of the model in ``path`` that Muon steps: those of
    ``Network.matrices``, by their names in files, [rows, columns] or a stack of these. Layers that
    are not called so count as AdamW's, which takes more memory.
    """
    if trainer.optimizer != OptimizerName.muon:
        return []
    family, sees = family_seen(path, images)
    frozen = frozen_parts(trainer, family, sees_images=sees)
    return [
        tuple(shape)
        for name, shape in parameter_shapes(path).items()
        if _is_matrix(name, shape, in_tower(name, family) is not None)
        and not stays(name, frozen, family)
    ]


def _is_matrix(name: str, shape: Sequence[int], of_tower: bool) -> bool:
    if not of_tower and _OF_LAYERS.fullmatch(name) is None:
        return False
    if len(shape) == 2 and not name.endswith(".weight"):
        return False
    if len(shape) not in (2, 3):
        return False
    return min(shape[-2:]) > 1
