"""Image files for tests, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image as pil

ORIENTATION = 0x0112


def noise(width: int, height: int, seed: int = 0) -> pil.Image:
    """A picture of which every pixel differs from its neighbours, so that a change of any place
    is seen.
    """
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return pil.fromarray(values)


def encoded(picture: pil.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def png(width: int = 16, height: int = 24, seed: int = 0) -> bytes:
    return encoded(noise(width, height, seed))


def rotated_jpeg(picture: pil.Image, orientation: int) -> bytes:
    """The picture as a camera writes it that was held another way up."""
    exif = pil.Exif()
    exif[ORIENTATION] = orientation
    return encoded(picture, "JPEG", exif=exif, quality=100, subsampling=0)


def exif_of(*, kind: int, value: bytes) -> bytes:
    """EXIF data with an orientation of two values of any kind, by TIFF's numbers of kinds, where
    one number belongs.
    """
    return (
        b"Exif\0\0II*\0" + struct.pack("<IHHHI", 8, 1, ORIENTATION, kind, 2) + value + b"\0\0\0\0"
    )


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )
