"""Wraps a Hugging Face tokenizer in the two verbs that the data plane needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from siirl_dask.errors import ConfigError
from siirl_dask.models.loading import refused_by_name
from siirl_dask.rollout.chat_turns import ChatTurns, without_nulls

_OF_BATCHES = ("truncation", "padding")  # settings of single calls, which a tokenizer remembers


class HuggingFaceTokenizer:
    """A Tokenizer: strings are encoded as they are, chat messages through the model's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
        self._tokenizer = tokenizer
        self._path = path
        self._turns: ChatTurns | None = None

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token."""
        return self._tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token."""
        return self._tokenizer.pad_token_id  # type: ignore[no-any-return]

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The tokenizer's rules for finding tool calls and thoughts in what the model writes; most have none."""
        template: dict[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        return template

    @property
    def identity(self) -> str | None:
        """Digest of everything that token ids depend on: vocabulary, rules, chat template, special tokens.

        None for a tokenizer that does not tell its rules (one that is not of the package ``tokenizers``).
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        rules = {name: rule for name, rule in json.loads(backend.to_str()).items() if name not in _OF_BATCHES}
        template, special = self._tokenizer.chat_template, self._tokenizer.special_tokens_map
        text = json.dumps([rules, template, special], sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()

    def encode(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a string, or of chat messages up to where the assistant answers.

        ``tools`` are JSON schemas for the chat template. A field that is null is as one that is not there: Arrow gives
        each message every field that any message of the table has. ConfigError for messages where the model has no
        template.
        """
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return self._encode_chats([prompt], tools)[0]

    def after_turn(
        self,
        before: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        last: int,
    ) -> list[int]:
        """Return the ids that new messages add to a conversation whose latest turn was sampled: see ``chat_turns.py``.

        ConfigError for a chat template that cannot be continued.
        """
        self.check_turns()
        assert self._turns is not None
        return self._turns.after_turn(before, new, tools, last)

    def check_turns(self) -> None:
        """Raise ConfigError for a chat template whose conversations cannot be continued token by token."""
        if self._turns is None:
            self._turns = ChatTurns(self._tokenizer, self._path)

    def lengths(self, prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[int]:
        """Return the number of tokens of each prompt, as ``encode`` gives them, many at a time. ConfigError alike."""
        if not prompts:
            return []
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            return [len(ids) for ids in self._encode_chats(prompts)]
        return [len(ids) for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def _encode_chats(self, chats: Sequence[Any], tools: Sequence[Mapping[str, Any]] = ()) -> list[list[int]]:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model.path={self._path!r}: its tokenizer has no chat template, and a prompt is a list of messages; "
                "expected a chat model, or prompts that are strings"
            )
        messages = [[without_nulls(message) for message in chat] for chat in chats]
        given: list[Any] | None = [*map(dict, tools)] or None
        encoded: Any = self._tokenizer.apply_chat_template(
            messages, tools=given, add_generation_prompt=True, return_dict=False
        )
        return [list(ids) for ids in encoded]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of token ids, with spaces as they are."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)


def load_tokenizer(path: str, subject: str) -> HuggingFaceTokenizer:
    """Load the tokenizer in a Hugging Face folder. ConfigError, beginning with ``subject``, if it cannot be loaded."""
    with refused_by_name(path, subject):
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True), path)


def end_tokens(config: GenerationConfig | None, tokenizer: HuggingFaceTokenizer) -> frozenset[int]:
    """Return the end tokens of the model's generation config and of its tokenizer."""
    configured = config.eos_token_id if config is not None else None
    ends = [configured] if isinstance(configured, int) else list(configured or [])
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return frozenset(ends)
