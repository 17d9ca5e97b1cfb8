"""Images: read safely, and made into pixels by the one processor that engines and trainers
share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from siirl_dask.config import ImagesConfig
from siirl_dask.images.image import Image, check_layout, images_of, normalised

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor

__all__ = [
    "Image",
    "check_layout",
    "drawn",
    "families",
    "features",
    "images_of",
    "load_processor",
    "noise",
    "normalised",
    "processor",
    "prompts",
    "reading",
    "thumbnail",
]


def load_processor(folder: str, settings: ImagesConfig | None) -> ImageProcessor | None:
    """Return the processor of the model in ``folder``; None where no images are used.

    Raises:
        ConfigError: as of ``ImageProcessor.load``.
    """
    if settings is None or not settings.used:
        return None
    from siirl_dask.images.processor import ImageProcessor  # imports torch and transformers

    return ImageProcessor.load(folder, settings)
