"""Small pictures of images, as data URLs: a page that holds them loads nothing."""

from __future__ import annotations

import io
from base64 import b64encode

from PIL import Image as pil

from siirl_dask.images.reading import decode

_SIDE = 256  # most pixels of a side
_BYTES = 20_000  # of a thumbnail, before it becomes text
# side and quality of JPEG, the best first
_TRIES = ((_SIDE, 85), (_SIDE, 60), (_SIDE, 30), (_SIDE // 2, 60))
_LAST = (_SIDE // 4, 30)  # at most 64 x 64 pixels, of which no content makes as many bytes


def thumbnail(data: bytes, max_pixels: int) -> str:
    """Return a data URL of the image file ``data``, at most 256 pixels wide and high: a PNG where
    it is small enough.

    Raises:
        ImageError: as of ``decode``.
    """
    picture = decode(data, max_pixels)
    picture.thumbnail((_SIDE, _SIDE))
    exact = _encoded(picture, "PNG")
    if len(exact) <= _BYTES:
        return _url("png", exact)
    for side, quality in _TRIES:
        if len(small := _jpeg(picture, side, quality)) <= _BYTES:
            return _url("jpeg", small)
    side, quality = _LAST
    return _url("jpeg", _jpeg(picture, side, quality))


def _jpeg(picture: pil.Image, side: int, quality: int) -> bytes:
    picture = picture.copy()
    picture.thumbnail((side, side))
    return _encoded(picture, "JPEG", quality)


def _encoded(picture: pil.Image, kind: str, quality: int = 0) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, quality=quality)
    return file.getvalue()


def _url(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{b64encode(content).decode()}"
