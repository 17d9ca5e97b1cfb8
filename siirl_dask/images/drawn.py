"""Files of pictures that a program has drawn."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image as pil

from siirl_dask.errors import ImageError


def png_of(picture: Any) -> bytes:
    """Return the PNG of a Pillow image, or of an array of uint8. ImageError for an array that is
    no picture.
    """
    if not isinstance(picture, pil.Image):
        try:
            picture = pil.fromarray(picture)
        except (TypeError, ValueError, AttributeError) as error:
            raise ImageError(
                f"an array of {getattr(picture, 'shape', None)} is no picture: {error}"
            ) from error
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
