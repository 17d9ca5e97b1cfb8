"""A Hugging Face tokenizer, reduced to what the data plane needs of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from siirl_dask.errors import ConfigError


class HuggingFaceTokenizer:
    """Strings are encoded as they are, nothing added; messages go through the model's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
        self._tokenizer = tokenizer
        self._path = path

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def pad_token_id(self) -> int | None:
        return self._tokenizer.pad_token_id  # type: ignore[no-any-return]

    def encode(self, prompt: str | Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a string, or of chat messages up to where the assistant answers."""
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model.path={self._path!r}: its tokenizer has no chat template, and a prompt is a list of messages; "
                "expected a chat model, or prompts that are strings"
            )
        messages = [dict(message) for message in prompt]
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)


def end_tokens(config: GenerationConfig | None, tokenizer: HuggingFaceTokenizer) -> frozenset[int]:
    """Those of the model's generation config and the tokenizer's own."""
    given = config.eos_token_id if config is not None else None
    ends = [given] if isinstance(given, int) else list(given or [])
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return frozenset(ends)
