"""A reward model from a Hugging Face folder: a sequence classifier with one label, whose logit
is the score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from siirl_dask.config import ModelConfig
from siirl_dask.context import HoldsNoGroups
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import (
    ModelUse,
    read_places,
    read_settings,
    table_places,
)
from siirl_dask.models.loading import load_pretrained
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.packed_weights import check_not_packed
from siirl_dask.training.trainer import PackedRows


class TorchRewardModel(HoldsNoGroups):
    """A RewardModel in torch. Rows are prompt and response, in token ids of the policy's
    tokenizer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: str,
        budget: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``budget`` bounds the tokens of one batch, padding included; a longer row is a batch by
        itself.

        ``progress`` is called for each batch.
        """
        self._progress = progress
        dtype = torch_dtype(config.dtype, torch.device(device))
        self._model = _load(config, dtype).to(torch.device(device)).eval()  # type: ignore[arg-type]
        self._model.config.get_text_config().use_cache = False
        self._pad: int = self._model.config.get_text_config().pad_token_id
        self._vocabulary: int = self._model.config.get_text_config().vocab_size
        self._places = table_places(self._model)
        self._budget = budget

    @torch.no_grad()
    def scores(self, rows: PackedRows) -> Tensor:
        """Score each row, independent of the rows beside it. [R] float32 on the CPU. ConfigError
        for unknown tokens, and for a row of more tokens than the model has positions for.
        """
        if len(rows.tokens) and int(rows.tokens.max()) >= self._vocabulary:
            raise ConfigError(
                f"token {int(rows.tokens.max())} is none of the reward model's {self._vocabulary}: "
                "expected a reward model with the policy's tokenizer"
            )
        scores = torch.zeros(len(rows))
        texts = rows.tokens.split(rows.offsets.diff().tolist())
        lengths = [len(text) for text in texts]
        if self._places is not None and max(lengths, default=0) > self._places:
            raise ConfigError(
                f"a row has {max(lengths)} tokens, and the reward model has positions for "
                f"{self._places}: expected at most that"
            )
        for batch in _batches(lengths, self._budget):
            scores[batch] = self._score([texts[row] for row in batch])
            self._progress()
        return scores

    def close(self) -> None:
        """Free the weights; scoring is no longer possible."""
        del self._model

    def _score(self, texts: list[Tensor]) -> Tensor:
        """Score rows as one batch, padded on the right, where a causal model does not look."""
        device = self._model.device
        padded = torch.nn.utils.rnn.pad_sequence(
            texts, batch_first=True, padding_value=self._pad
        ).to(device)
        lengths = torch.tensor([len(text) for text in texts], device=device)
        mask = (torch.arange(padded.shape[1], device=device) < lengths[:, None]).long()
        logits: Tensor = self._model(input_ids=padded, attention_mask=mask).logits
        return logits[:, 0].float().cpu()


def _batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Yield batches of row indices, of similar length; each has at most ``budget`` tokens with
    padding, or one row.
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[row] > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _subject(config: ModelConfig) -> str:
    return f"reward model {config.path!r}"


def _load(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    subject = _subject(config)
    check_settings(config)
    kind: Any = AutoModelForSequenceClassification
    return load_pretrained(kind, config.path, dtype, subject, longest_row=config.longest_row)


def check_row_length(model: ModelConfig, longest: int) -> None:
    """Raise ConfigError for a reward model whose table of positions is shorter than the run's
    ``longest`` row.
    """
    places = read_places(model.path, ModelUse.SCORES)
    if places is not None and longest > places:
        raise ConfigError(
            f"{_subject(model)}: it has positions for {places} tokens, and data.max_prompt_length + "
            f"rollout.max_response_length is {longest}: expected at most that"
        )


def check_settings(model: ModelConfig) -> None:
    """Raise ConfigError for a classifier of several labels, for one whose config names no token
    to pad rows with, and for packed weights. Does nothing without a ``config.json`` of a kind that
    transformers knows.
    """
    check_not_packed(model.path)
    config = read_settings(model.path)
    if config is None:
        return
    subject = _subject(model)
    if config.num_labels != 1:
        raise ConfigError(f"{subject}: it has {config.num_labels} labels; expected 1, the score")
    text = config.get_text_config()
    if text.pad_token_id is None:
        raise ConfigError(
            f"{subject}: give its config.json a pad_token_id, so that rows can be batched"
        )
    if not 0 <= text.pad_token_id < text.vocab_size:
        raise ConfigError(
            f"{subject}: its config.json has pad_token_id={text.pad_token_id}, and its embedding "
            f"has {text.vocab_size} tokens: expected one of them, such as the end token"
        )
