"""The config group ``model``: the model that is trained and that generates."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from siirl_dask.config.checks import at_least, located
from siirl_dask.errors import ConfigError

_OF_RENDERING = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *(
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
    ),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"),
)
"""Arguments of ``apply_chat_template`` that are no variables of a template, and those that each
prompt gives."""


class Dtype(StrEnum):
    """Number type in which a model computes."""

    auto = "auto"
    """bfloat16 where the workers have accelerators that all compute in it, else float32."""
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number; of ``auto`` the larger ones, while it is not decided."""
        if self is Dtype.bfloat16:
            return 2
        return 4


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """``model``: the model that is trained and that generates."""

    path: str = "???"
    """Folder with a model that transformers loads: config, weights, tokenizer."""
    dtype: Dtype = Dtype.auto
    """Number type of the computation: ``auto``, ``float32`` or ``bfloat16``. ``auto`` takes
    bfloat16 where the workers have accelerators that all compute in it, and float32 elsewhere; a
    run that goes on keeps the type it began with."""

    float32_head: bool = False
    """Compute logits from hidden states and head in float32 where the model computes in bfloat16,
    in trainers and engines alike (arXiv:2506.13585). The weights of the head are rounded to
    bfloat16 as before."""
    longest_row: int | None = None
    """Tokens of the longest row, prompt and response, for which rotary embeddings are computed that
    follow it (``longrope``). None: those of the run, ``data.max_prompt_length`` and the longest
    ``rollout.max_response_length``; for a model that a DAG names by itself, at most those of the
    model's original context."""
    template: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, such as ``{enable_thinking: false}``, wherever it
    is rendered."""
    add_special_tokens: Literal["auto", True, False] = "auto"
    """Put the tokenizer's special tokens, such as a BOS, around prompts that are texts. ``auto``:
    those that it puts by itself, but no second BOS before a text that begins with one. Chats have
    what their template writes."""

    def __post_init__(self) -> None:
        self.path = located("model.path", self.path)
        if self.longest_row is not None:
            at_least("model", 1, longest_row=self.longest_row)
        for name in self.template:
            if name in _OF_RENDERING:
                raise ConfigError(
                    f"model.template={self.template}: {name} is given for each prompt; expected "
                    "keyword arguments that "
                    "the chat template itself reads, as in {enable_thinking: false}"
                )
