"""Tokens that stand for images, videos and sound, in rows of text: a policy may sample them as any
other.

Some models read another token in their place: Gemma 4 reads its padding, in the forward that
prepares what its decoder gets. Packed rows go to the decoder at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl_dask.images.prompts import placeholder_tokens


def placeholder_ids(config: Any) -> list[int]:
    """Return the tokens that a model's config names as those of images, videos and sound; those of
    them that a policy may sample, ascending.
    """
    vocabulary: int = config.get_text_config().vocab_size
    return sorted(token for token in placeholder_tokens(config.to_dict()) if token < vocabulary)


class ReplacedTokens:
    """Tokens in whose place a model's own forward reads others."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}

    @contextmanager
    def recorded(self, model: PreTrainedModel) -> Iterator[None]:
        """Record which tokens the model reads in the place of those of the passes inside."""
        given: list[Tensor] = []

        def take_given(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            given[:] = inputs[:1]

        def compare(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not given or not inputs or inputs[0].shape != given[0].shape:
                return
            others = inputs[0] != given[0]
            replaced = zip(given[0][others].tolist(), inputs[0][others].tolist(), strict=True)
            self._read |= dict(replaced)

        hooks = [
            model.register_forward_pre_hook(take_given),
            model.get_input_embeddings().register_forward_pre_hook(compare),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def applied(self, ids: Tensor) -> Tensor:
        """Return the tokens that the model reads where it is given ``ids``, of the same shape."""
        for token, read in self._read.items():
            ids = torch.where(ids == token, read, ids)
        return ids
