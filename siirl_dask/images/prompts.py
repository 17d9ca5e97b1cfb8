"""Prompts that say where images stand: ``<image>`` in a text, or ``{type: image}`` in a chat
message's content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from siirl_dask.errors import ImageError

MARK = "<image>"
"""Stands for an image in the text of a prompt, as in the datasets of verl, siiRL and EasyR1."""
# keys under which an entry of a message's content has its image
_OWN = ("image", "image_url", "url", "base64", "path")
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(?:id|index)")


def placeholder_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens that a model's ``config.json`` names as places for images, videos and
    sound, each with its kind: ``image``, ``video`` or ``audio``.
    """
    found = {}
    for key, token in config.items():
        named = _PLACEHOLDER.fullmatch(key)
        if named is not None and isinstance(token, int):
            found[token] = named[1]
    return found


def marked(
    prompt: str | Sequence[Mapping[str, Any]], placeholder: str
) -> str | list[dict[str, Any]]:
    """Return a prompt as the tokenizer takes it, with one placeholder an image.

    ``<image>`` in a string becomes ``placeholder``. In chats a message's text becomes a list of
    texts and images, which the chat template writes as the model knows them. ImageError for an
    entry that is neither, or has its own image.
    """
    if isinstance(prompt, str):
        return prompt.replace(MARK, placeholder)
    return [{**message, "content": _content(message.get("content"))} for message in prompt]


def _content(content: object) -> list[dict[str, Any]] | object:
    if isinstance(content, str):
        return _cut(content)
    if not isinstance(content, Sequence):
        return content  # None, of an assistant's turn that only calls tools
    return [part for entry in content for part in _entry(entry)]


def _cut(text: str) -> list[dict[str, Any]]:
    """Return texts and images in turn; an empty text stays where there is nothing else."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    if not parts:
        return [{"type": "text", "text": ""}]
    return parts


def _entry(entry: object) -> list[dict[str, Any]]:
    """Return an entry of a content list without its nulls: Arrow gives each entry of a list the
    keys of all.
    """
    if isinstance(entry, str):
        return _cut(entry)
    kept = {}
    if isinstance(entry, Mapping):
        kept = {key: value for key, value in entry.items() if value is not None}
    if kept.get("type") == "text" and isinstance(kept.get("text"), str):
        return _cut(kept["text"])
    if kept.get("type") == "image":
        own = [key for key in _OWN if key in kept]
        if own:
            raise ImageError(
                f"a message's content has an image of its own, under {own[0]!r}: expected {{type: "
                f"image}} alone, and the images in the column that images.column names"
            )
        return [{"type": "image"}]
    raise ImageError(
        f"a message's content has {entry!r:.100}: expected {{type: text, text: ...}} or {{type: "
        f"image}}"
    )
