"""The families of models that see images, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from siirl_dask.errors import ConfigError

VlmFamily = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
"""Names of the known families: the ``model_type`` of their config.json."""


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """One kind of model, by the names that transformers gives its parts."""

    placeholder: str
    """Text that stands for an image in a prompt that is a string; in chats the template writes
    it."""
    tower: str
    """Module of the visual tower, with what maps its output to the width of the text."""
    positions: str
    """Method of ``model.model`` that gives rotary positions, [3, 1, T], of a row with images."""
    blocks: str
    """List of the tower's layers, within it."""
    projector: tuple[str, ...]
    """Modules of the tower, within it, that map what it sees to the width of the text."""


FAMILIES: Mapping[str, ImageFamily] = {
    kind: ImageFamily(
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        tower="model.visual",
        positions="get_rope_index",
        blocks="blocks",
        projector=("merger", "deepstack_merger_list"),
    )
    for kind in get_args(VlmFamily)
}
"""Families by the ``model_type`` of config.json."""


def family_of(config: Mapping[str, Any], path: str) -> ImageFamily:
    """Return the family of a model by its config.json. ConfigError where it has no images, or is
    of another one.
    """
    kind = str(config.get("model_type"))
    if kind in FAMILIES:
        return FAMILIES[kind]
    known = ", ".join(FAMILIES)
    if "vision_config" not in config:
        raise ConfigError(
            f"model.path={path!r} is a {kind!r}, which sees no images, and images.column is set: "
            f"expected a model of {known}, or images.column=null"
        )
    raise ConfigError(
        f"model.path={path!r} is a {kind!r}: of models that see images expected one of {known}"
    )
