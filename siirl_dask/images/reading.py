"""Reads image files that nobody has checked: sizes from headers, bounded bytes and pixels, every
mode as RGB.

Errors say what is wrong with the file; the caller knows which image of which row it is.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO

import numpy as np
from PIL import Image as pil
from PIL import UnidentifiedImageError
from siirl_storage import join, open_fs, retries_end_at

from siirl_dask.errors import ImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are read, by Pillow's names. Others have decoders that few files test."""
# characters of a URL, which may hold the image itself, and of a message, which may hold what a
# server sent
_SAID = 200
_LISTED = "JPEG, PNG, WebP, GIF or BMP"
_ORIENTATION = 0x0112  # tag of EXIF
_TURNS = {
    2: pil.Transpose.FLIP_LEFT_RIGHT,
    3: pil.Transpose.ROTATE_180,
    4: pil.Transpose.FLIP_TOP_BOTTOM,
    5: pil.Transpose.TRANSPOSE,
    6: pil.Transpose.ROTATE_270,
    7: pil.Transpose.TRANSVERSE,
    8: pil.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # values of the orientation that swap width and height


def size_of(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return width and height as they are shown, after the rotation that EXIF asks for, from the
    header alone.

    Raises:
        ImageError: no image of a known format, or one of more than ``max_pixels`` pixels.
    """
    with _opened(data, max_pixels) as picture:
        width, height = picture.size
        if _orientation(picture) in _SIDEWAYS:
            return (height, width)
        return (width, height)


def format_of(data: bytes, max_pixels: int) -> str:
    """Return the file's format, one of ``FORMATS``. ImageError as of ``size_of``."""
    with _opened(data, max_pixels) as picture:
        # one that a camera wrote with a preview
        if picture.format == "MPO":
            return "JPEG"
        return str(picture.format)


def decode(data: bytes, max_pixels: int) -> pil.Image:
    """Return the picture in RGB, rotated as EXIF asks: the first one of an animation, on white
    where it is transparent.

    Raises:
        ImageError: as of ``size_of``, and for a file that is cut off or damaged.
    """
    with _opened(data, max_pixels) as picture:
        turn = _TURNS.get(_orientation(picture))
        picture.load()
        rgb = _as_rgb(picture)
        if turn is None:
            return rgb
        return rgb.transpose(turn)


def located(path: str, folder: str | None) -> str:
    """Return the URL of an image's path; relative ones begin in ``folder``. ImageError for an
    unusable one.
    """
    if not path:
        raise ImageError("its path is empty")
    if path.startswith(("/", "data:")) or "://" in path or "::" in path:
        return path
    if folder is None:
        raise ImageError(
            f"its path {_short(path)} is relative: set images.folder to where such paths begin"
        )
    return join(folder, path)


def fetch(url: str, *, max_bytes: int, timeout: float) -> bytes:
    """Return the file at a local path or any fsspec URL.

    Raises:
        ImageError: it cannot be read, has more than ``max_bytes`` bytes, or does not come within
            ``timeout`` seconds.
    """
    answer: SimpleQueue[bytes | Exception] = SimpleQueue()
    deadline = time.monotonic() + timeout

    def read() -> None:
        try:
            fs, path = open_fs(url)
            with retries_end_at(deadline), fs.open(path, "rb") as file:
                answer.put(_read_up_to(file, max_bytes + 1, deadline))
        except Exception as error:  # stores raise anything from OSError to errors of their own
            answer.put(error)

    Thread(
        target=read,
        name="siirl-image",
        daemon=True,
    ).start()  # one that hangs must not keep the process from ending
    try:
        got = answer.get(timeout=timeout)
    except Empty:
        raise ImageError(
            f"{_short(url)} did not come within images.timeout={timeout:g} seconds"
        ) from None
    if isinstance(got, Exception):
        raise ImageError(
            f"{_short(url)} cannot be read: {type(got).__name__}: {str(got)[:_SAID]}"
        ) from got
    check_bytes(got, max_bytes, _short(url))
    return got


def _read_up_to(file: IO[bytes], most: int, deadline: float) -> bytes:
    """Read a file to its end or up to ``most`` bytes, whatever the store says of its size, which
    may be untrue.

    Of a server that tells no size one read gives what has come. TimeoutError at ``deadline``, for
    one that never ends.
    """
    parts: list[bytes] = []
    left = most
    while left and (part := file.read(left)):
        if time.monotonic() > deadline:
            raise TimeoutError("it comes too slowly")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _short(url: str) -> str:
    if len(url) <= _SAID:
        return repr(url)
    return f"{url[:_SAID]!r}..."


def check_bytes(data: bytes, max_bytes: int, subject: str) -> None:
    """Raise ImageError, beginning with ``subject``, for a file that is empty or too large."""
    if not data:
        raise ImageError(f"{subject} is empty")
    if len(data) > max_bytes:
        more = ""
        if len(data) == max_bytes + 1:
            more = "more than "
        raise ImageError(
            f"{subject} has {more}{len(data) - bool(more):,} bytes: expected at most {max_bytes:,} "
            "(images.max_bytes)"
        )


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[pil.Image]:
    """Open a file by its header. Whatever Pillow raises, then or inside, becomes an ImageError."""
    try:
        with pil.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width < 1 or height < 1:
                raise ImageError(f"it is {width} x {height} pixels")
            if width * height > max_pixels:
                raise ImageError(
                    f"it is {width:,} x {height:,} pixels: expected at most {max_pixels:,} in all "
                    "(images.max_source_pixels)"
                )
            yield picture
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"it is no {_LISTED}: it begins with {data[:12]!r}") from None
    except pil.DecompressionBombError as error:
        raise ImageError(
            f"it has too many pixels (images.max_source_pixels={max_pixels:,}): {error}"
        ) from None
    except Exception as error:
        # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise ImageError(
            f"it is damaged or cut off: {type(error).__name__}: {str(error)[:_SAID]}"
        ) from error


def _orientation(picture: pil.Image) -> int:
    """Return the orientation by EXIF data before the pixels, 1 without: Pillow decodes a PNG to
    find those behind.

    Data that cannot be read say nothing of it: cameras and editors write such, and the pixels are
    whole.
    """
    if picture.format == "PNG" and "exif" not in picture.info:
        return 1
    try:
        return int(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # Pillow raises SyntaxError, struct.error and more
        return 1


def _as_rgb(picture: pil.Image) -> pil.Image:
    if picture.mode == "RGB":
        if picture.readonly:
            return picture.copy()
        return picture
    # 16 bits a pixel, which Pillow's own conversion would cut at 255
    if picture.mode.startswith(("I", "F")):
        return pil.fromarray(
            (np.asarray(picture).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)
        ).convert("RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = pil.new("RGBA", picture.size, "white")
        return pil.alpha_composite(ground, picture).convert("RGB")
    return picture.convert("RGB")
