"""Wraps a Hugging Face tokenizer in the two verbs that the data plane needs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from siirl_dask.config import ModelConfig
from siirl_dask.errors import ConfigError, DataError, did_you_mean
from siirl_dask.models.loading import refused_by_name
from siirl_dask.rollout.chat_turns import ChatTurns
from siirl_dask.rollout.end_tokens import end_tokens, read_generation_config, read_vocabulary
from siirl_dask.rollout.message_forms import MessageForms
from siirl_dask.schema import ENDS_WITH_ANSWER

_TURN = "siirlturn"
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")
"""Names of files that hold a vocabulary, beside those that a tokenizer's class has."""
_OF_BATCHES = ("truncation", "padding")  # settings of single calls, which a tokenizer remembers


class HuggingFaceTokenizer:
    """A Tokenizer: strings get the tokenizer's special tokens, chat messages go through the
    model's chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        *,
        template: Mapping[str, Any] | None = None,
        add_special_tokens: Literal["auto", True, False] = "auto",
        generation: GenerationConfig | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """``template`` and ``add_special_tokens`` are those of ModelConfig. ConfigError for an
        argument that the chat template does not read. ``generation`` has the model's end tokens,
        ``vocabulary`` is the number of tokens of its embedding; None where it is not known.
        """
        self._tokenizer = tokenizer
        self._path = path
        self._template = dict(template or {})
        self._add_special_tokens = add_special_tokens
        self._generation = generation
        self._vocabulary = vocabulary
        self.end_tokens = end_tokens(generation, tokenizer.eos_token_id, path, vocabulary)
        """Tokens that end a response: the generation config's and the tokenizer's."""
        self._left_out: frozenset[int] | None = None
        self._treated_otherwise: frozenset[int] | None = None
        """Tokens that ``decode`` leaves out and ``plain_text`` does not, or the other way round."""
        self._turns: ChatTurns | None = None
        self._forms = MessageForms(tokenizer, path, self._template)
        self._check_template()

    def with_options(self, model: ModelConfig) -> HuggingFaceTokenizer:
        """Return the tokenizer with the options of ``model`` for prompts. ConfigError where
        these do not fit it.
        """
        return HuggingFaceTokenizer(
            self._tokenizer,
            model.path,
            template=model.template,
            add_special_tokens=model.add_special_tokens,
            generation=self._generation,
            vocabulary=self._vocabulary,
        )

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token."""
        return self._tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token."""
        return self._tokenizer.pad_token_id  # type: ignore[no-any-return]

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""
        return bool(self._tokenizer.chat_template)

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The tokenizer's rules for finding tool calls and thoughts in what the model writes;
        most have none.
        """
        template: dict[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        return template

    @property
    def identity(self) -> str | None:
        """Digest of everything that token ids depend on: vocabulary, rules, chat template, special
        tokens.

        None for a tokenizer that does not tell its rules (one that is not of the package
        ``tokenizers``).
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        rules = {
            name: rule
            for name, rule in json.loads(backend.to_str()).items()
            if name not in _OF_BATCHES
        }
        parts = [rules, self._tokenizer.chat_template, self._tokenizer.special_tokens_map]
        if self._template:
            parts.append(self._template)
        if any(self._around()):
            parts.append(str(self._add_special_tokens))
        text = json.dumps(parts, sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()

    @property
    def untemplated_note(self) -> str:
        """Return a sentence on prompts that are texts where the model has a chat template; empty
        where it has none.
        """
        if not self._tokenizer.chat_template:
            return ""
        return (
            "prompts are texts, and the model's chat template is for messages alone: a model that "
            "was trained to chat wants messages, which `siirl-dask data import SRC DEST --chat "
            "COLUMN` makes of a column of texts"
        )

    @property
    def special_tokens_note(self) -> str:
        """Return a sentence on the special tokens around prompts that are texts; empty where
        there are none.
        """
        before, after = self._around()
        shown = []
        if before:
            shown.append(f"{self.decode(before, skip_special=False)} before")
        if after:
            shown.append(f"{self.decode(after, skip_special=False)} after")
        if not shown:
            return ""
        verb = "get"
        if self._add_special_tokens is False:
            verb = "do not get"
        own = "the tokenizer's own special tokens"
        return (
            f"model.add_special_tokens={str(self._add_special_tokens).lower()}: prompts that are "
            f"texts {verb} {own}, {' and '.join(shown)} each"
        )

    @property
    def unbegun_note(self) -> str:
        """Return a sentence where the chat template ends a prompt before the assistant's turn
        begins; empty where it does not, or there is none.
        """
        if not self._tokenizer.chat_template:
            return ""
        return self._forms.unbegun_note

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts before and after a text."""
        plain = self.encode_more("x")
        whole = list(self._tokenizer("x", add_special_tokens=True)["input_ids"])
        for begin in range(len(whole) - len(plain) + 1):
            if whole[begin : begin + len(plain)] == plain:
                return whole[:begin], whole[begin + len(plain) :]
        return whole[: len(whole) - len(plain)], []

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_answer: bool = False,
    ) -> list[int]:
        """Return the token ids of a string, or of chat messages up to where the assistant answers.

        ``tools`` are JSON schemas for the chat template. A field that is null is as one that is not
        there: Arrow gives each message every field that any message of the table has. With
        ``continue_answer`` a last message of the assistant's is left open, for the model to go on
        with; without it such a message is a DataError, as is a token that the model's embedding has
        not. ConfigError for messages where the model has no template.
        """
        if isinstance(prompt, str):
            return self._encode_texts([prompt])[0]
        return self._encode_chats([prompt], tools, continue_answer)[0]

    def encode_more(self, text: str) -> list[int]:
        """Return the token ids of a string that goes on with an earlier one: no special tokens
        are put around it.
        """
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        self._check_embedded(ids)
        return ids

    def after_turn(
        self,
        before: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        last: int,
    ) -> list[int]:
        """Return the ids that new messages add to a conversation whose latest turn was sampled: see
        ``chat_turns.py``.

        ConfigError for a chat template that cannot be continued.
        """
        self.check_turns()
        assert self._turns is not None
        return self._turns.after_turn(before, new, tools, last)

    def check_turns(self) -> None:
        """Raise ConfigError for a chat template whose conversations cannot be continued token by
        token.
        """
        if self._turns is None:
            self._turns = ChatTurns(self._tokenizer, self._path, self._template)

    def lengths(self, prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[int]:
        """Return the number of tokens of each prompt, as ``encode`` gives them, many at a time; a
        last message of the assistant's counts as it is. ConfigError alike.
        """
        if not prompts:
            return []
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            return [len(ids) for ids in self._encode_chats(prompts, continue_answer=True)]
        return [len(ids) for ids in self._encode_texts(texts)]

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        adds = self._add_special_tokens is not False
        encoded = [
            list(ids) for ids in self._tokenizer(list(texts), add_special_tokens=adds)["input_ids"]
        ]
        first = self._tokenizer.bos_token
        if self._add_special_tokens == "auto" and first:
            for place, text in enumerate(texts):
                if (
                    text.startswith(first)
                    and encoded[place][:2] == [self._tokenizer.bos_token_id] * 2
                ):
                    del encoded[place][0]
        for ids in encoded:
            self._check_embedded(ids)
        return encoded

    def _check_embedded(self, ids: Sequence[int]) -> None:
        """Raise DataError for a token that was added to the tokenizer, and not to the model."""
        if self._vocabulary is None or not ids or max(ids) < self._vocabulary:
            return
        token = self._tokenizer.convert_ids_to_tokens(max(ids))
        raise DataError(
            f"the tokenizer of {self._path!r} makes token {max(ids)} of {token!r}, and the model's "
            f"embedding has {self._vocabulary} tokens (vocab_size): add the tokens to the model as "
            "well (resize_token_embeddings of transformers), or leave them out of tokenizer and "
            "chat template"
        )

    def _encode_chats(
        self,
        chats: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] = (),
        continue_answer: bool = False,
    ) -> list[list[int]]:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model.path={self._path!r}: its tokenizer has no chat template, and a prompt is a "
                "list of messages; expected a chat model, or prompts that are strings"
            )
        prepared = [self._forms.prepared(chat) for chat in chats]
        answered = [chat[-1]["role"] == "assistant" for chat in prepared]
        if any(answered) and not continue_answer:
            raise DataError(ENDS_WITH_ANSWER)
        schemas: list[Any] | None = [*map(dict, tools)] or None
        written: list[str] = [""] * len(prepared)
        for goes_on in sorted(set(answered)):
            places = [place for place, ends in enumerate(answered) if ends is goes_on]
            texts: Any = self._tokenizer.apply_chat_template(
                [prepared[place] for place in places],
                tools=schemas,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                tokenize=False,
                **self._template,
            )
            for place, text in zip(places, texts, strict=True):
                self._forms.check_written(prepared[place], text)
                written[place] = text
        encoded = [
            list(ids) for ids in self._tokenizer(written, add_special_tokens=False)["input_ids"]
        ]
        for ids in encoded:
            self._check_embedded(ids)
        return encoded

    def _check_template(self) -> None:
        """Raise ConfigError for arguments that no chat template reads: it would leave them out
        without a word.
        """
        if not self._template:
            return
        template: Any = self._tokenizer.chat_template
        if not template:
            raise ConfigError(
                f"model.template={self._template}: the tokenizer of {self._path!r} has no chat "
                "template"
            )
        texts = [template] if isinstance(template, str) else [*template.values()]
        words = {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}
        for name in self._template:
            if name not in words:
                raise ConfigError(
                    f"model.template={self._template}: the chat template of {self._path!r} does "
                    f"not read {name!r}{did_you_mean(name, words)}; leave it out"
                )

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of token ids, with spaces as they are.

        With ``skip_special`` tokens that end a text or a turn, and padding, are left out. Other
        special tokens stay in the text: to many models ``<think>`` and ``<tool_call>`` are such.
        """
        shown = list(token_ids)
        if skip_special:
            left_out = self._ids_left_out()
            shown = [token for token in shown if token not in left_out]
        text = self._tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of token ids as transformers writes it with ``skip_special_tokens=True``,
        which is what rewards of verl and TRL read: without any special token, and with spaces
        before punctuation taken out where the tokenizer does so. None where ``decode`` with
        ``skip_special`` gives the same.
        """
        if self._treated_otherwise is None:
            self._treated_otherwise = self._special_ids() ^ self._ids_left_out()
        cleans_up = self._tokenizer.clean_up_tokenization_spaces
        if not cleans_up and self._treated_otherwise.isdisjoint(token_ids):
            return None
        plain = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        if plain == self.decode(token_ids, skip_special=True):
            return None
        return plain

    def _special_ids(self) -> frozenset[int]:
        """Return the special tokens, those included that have no name, such as a mask's."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(self._tokenizer.all_special_ids) | {
            token for token, rule in added if rule.special
        }

    def _ids_left_out(self) -> frozenset[int]:
        if self._left_out is None:
            self._left_out = self._ends()
        return self._left_out

    def _ends(self) -> frozenset[int]:
        """Return the end tokens, that of padding, and the special token that the chat template
        ends a turn with.
        """
        ends = set(self.end_tokens)
        if self.pad_token_id is not None:
            ends.add(self.pad_token_id)
        if self._tokenizer.chat_template:
            # a template that fails here fails on prompts too, and is named there
            with suppress(Exception):
                ends |= set(self._tokenizer.all_special_ids) & set(self._ids_after_turn()[:1])
        return frozenset(ends)

    def _ids_after_turn(self) -> list[int]:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _TURN}]
        text: Any = self._tokenizer.apply_chat_template(chat, tokenize=False, **self._template)
        return self.encode_more(str(text).partition(_TURN)[2].strip())


def load_tokenizer(path: str, subject: str) -> HuggingFaceTokenizer:
    """Load the tokenizer in a Hugging Face folder. ConfigError, beginning with ``subject``, if
    it cannot be loaded.
    """
    with refused_by_name(path, subject):
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        generation = read_generation_config(path)
    files = {*_OF_TOKENIZERS, *tokenizer.vocab_files_names.values()}
    if tokenizer.vocab_files_names and not any(Path(path, file).is_file() for file in files):
        # transformers would make an empty one, to which a prompt has no tokens, or unknown ones
        raise ConfigError(f"{subject}: there is no tokenizer (none of {', '.join(sorted(files))})")
    return HuggingFaceTokenizer(
        tokenizer, path, generation=generation, vocabulary=read_vocabulary(path)
    )
