"""Pictures of random pixels, on which models and processors are tried."""

from __future__ import annotations

from io import BytesIO

import numpy as np

from siirl_dask.images.image import Image


def noise(width: int, height: int, seed: int) -> Image:
    """Return a PNG of random pixels; same seed, same pixels."""
    from PIL import Image as pil  # an extra, which whoever has a processor of images has

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    pil.fromarray(pixels).save(file, "PNG")
    return Image(file.getvalue())
