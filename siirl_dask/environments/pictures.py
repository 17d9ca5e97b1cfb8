"""Images in what an environment says: content parts ``{type: image, image: ...}``, as chat
templates know them.

An image becomes a data URL, which is text: messages stay plain, and go from process to process as
they are.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from siirl_dask.errors import ImageError

_HEAD = "data:image;base64,"
_DIMENSIONS = 3  # of an array: height, width, colours
_EXPECTED = "its file's bytes, a data URL, a Pillow image, or an array of uint8 [height, width, 3]"
Parts = Sequence[Mapping[str, Any]]
"""The content of one message: ``{type: text, text: ...}`` and ``{type: image, image: ...}``."""


def is_parts(value: object) -> TypeGuard[Parts]:
    """Return whether a value is the content of a message by itself: parts, none of which is a
    message.
    """
    if not isinstance(value, (list, tuple)) or len(value) == 0:
        return False
    return all(
        isinstance(part, Mapping) and "type" in part and "role" not in part for part in value
    )


def with_urls(parts: Parts) -> list[Mapping[str, Any]]:
    """Return parts with each image as a data URL; one without its own image stays. ImageError
    for no image.
    """
    return [
        {"type": "image", "image": _url(part["image"])}
        if part.get("type") == "image" and part.get("image") is not None
        else part
        for part in parts
    ]


def file_of(part: Mapping[str, Any]) -> bytes | None:
    """Return the file of an image that ``with_urls`` has made; None for a part without an image
    of its own.
    """
    url = None
    if part.get("type") == "image":
        url = part.get("image")
    if url is None:
        return None
    _, comma, data = str(url).partition(";base64,")
    if not comma:
        raise ImageError(f"an image is {str(url)[:80]!r}: expected {_EXPECTED}")
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise ImageError(f"an image's data URL is not base64: {error}") from error


def without_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the content of their images."""
    texts = []
    for message in messages:
        text = dict(message)
        if is_parts(message.get("content")):
            text["content"] = [
                {"type": part.get("type")} if "image" in part else part
                for part in message["content"]
            ]
        texts.append(text)
    return texts


def _url(image: Any) -> str:
    if isinstance(image, str) and image.startswith("data:") and ";base64," in image:
        return image
    if isinstance(image, (bytes, bytearray)):
        return _HEAD + b64encode(image).decode()
    if _is_array(image) or (hasattr(image, "mode") and callable(getattr(image, "save", None))):
        from siirl_dask.images.drawn import png_of  # Pillow: only where an environment draws

        return _HEAD + b64encode(png_of(image)).decode()
    raise ImageError(f"an image is {type(image).__name__} {image!r:.80}: expected {_EXPECTED}")


def _is_array(image: Any) -> bool:
    if str(getattr(image, "dtype", "")) != "uint8":
        return False
    return len(getattr(image, "shape", ())) == _DIMENSIONS
