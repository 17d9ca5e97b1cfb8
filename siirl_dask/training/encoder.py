"""A model that encodes texts from a Hugging Face folder: the mean of its last hidden states is
the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from siirl_dask.config import ModelConfig
from siirl_dask.context import HoldsNoGroups
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import ModelUse, read_places, read_settings
from siirl_dask.models.loading import load_pretrained, refused_by_name
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.packed_weights import check_not_packed
from siirl_dask.models.weight_files import UNUSED


class TorchTextEncoder(HoldsNoGroups):
    """A TextEncoder in torch, with the tokenizer of the model's own folder."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: str,
        max_tokens: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """A text's tokens after the first ``max_tokens`` are left out. ``progress`` is called for
        each text. ConfigError for a folder that cannot be loaded, and for a model that reads fewer
        tokens.
        """
        subject = _subject(config)
        check_settings(config, max_tokens)
        dtype = torch_dtype(config.dtype, torch.device(device))
        model = load_pretrained(AutoModel, config.path, dtype, subject, unused=UNUSED)
        with refused_by_name(config.path, subject):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                config.path, local_files_only=True, trust_remote_code=False
            )
        self._model = model.to(torch.device(device)).eval()  # type: ignore[arg-type]
        self._subject = subject
        self._max_tokens = max_tokens
        self._progress = progress

    @torch.no_grad()
    def embeddings(self, texts: Sequence[str]) -> Tensor:
        """Encode each text by itself, so that no bit depends on the others. [N, D] float32 on the
        CPU. A text without tokens has zeros.
        """
        width: int = self._model.config.hidden_size
        embeddings = torch.zeros(len(texts), width)
        for row, text in enumerate(texts):
            ids = self._tokenizer(text, truncation=True, max_length=self._max_tokens)["input_ids"]
            if ids:
                self._check_embedded(text, ids)
                given = torch.tensor([ids], device=self._model.device)
                hidden: Tensor = self._model(input_ids=given).last_hidden_state
                embeddings[row] = hidden[0].float().mean(0).cpu()
            self._progress()
        return embeddings

    def _check_embedded(self, text: str, ids: Sequence[int]) -> None:
        """Raise ConfigError for a token that was added to the tokenizer, and not to the model."""
        known = self._model.get_input_embeddings().num_embeddings
        if max(ids) >= known:
            raise ConfigError(
                f"{self._subject}: its tokenizer makes token {max(ids)} of {text!r:.60}, and the "
                f"model's embedding has {known} tokens: expected a tokenizer of the same model"
            )

    def close(self) -> None:
        """Free the weights; encoding is no longer possible."""
        del self._model


def check_settings(model: ModelConfig, max_tokens: int) -> None:
    """Raise ConfigError for an encoder that reads fewer than ``max_tokens`` tokens of a text, for
    one with a decoder, which would want a text of its own, and for packed weights. Does nothing
    without a ``config.json`` of a kind that transformers knows.
    """
    check_not_packed(model.path)
    config = read_settings(model.path)
    if config is None:
        return
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{_subject(model)}: {config.model_type} has a decoder beside its encoder; expected a "
            "model that is one or the other"
        )
    places = read_places(model.path, ModelUse.ENCODES)
    if places is None:
        places = getattr(config, "max_position_embeddings", None)
    if places is not None and max_tokens > places:
        raise ConfigError(
            f"{_subject(model)}: max_tokens={max_tokens}, and it has positions for {places} "
            "tokens: expected at most that"
        )


def _subject(model: ModelConfig) -> str:
    return f"encoder {model.path!r}"
