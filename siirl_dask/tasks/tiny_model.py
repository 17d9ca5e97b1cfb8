"""Writes a model and a tokenizer small enough for a test, as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from siirl_dask.models.loading import no_progress_bars
from siirl_dask.tasks.vocabulary import VOCABULARY

PAD = "<|pad|>"
END = "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

Family = Literal["qwen2", "qwen3", "qwen3_moe", "llama"]
_FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def tiny_tokenizer(
    *, chat_template: str | None = None, pieces: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges: a token is a byte, or one of ``pieces``.
    AutoTokenizer loads it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, PAD, END])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END)
    if pieces:
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    intermediate: int | None = None,
    vocabulary: int = VOCABULARY,
    family: Family = "qwen3",
    tied: bool = True,
    chat_template: str | None = None,
    pieces: Sequence[str] = (),
) -> Path:
    """Write a random model and its tokenizer; same seed, same weights. Some engines take no
    ``head_dim`` below 32.

    ``pieces`` are texts of one token each, at most 6 in the default vocabulary. With a larger
    ``vocabulary`` it is as large as a real one, and most of what it samples is no text.
    """
    config_class, model_class = _FAMILIES[family]
    tokenizer = tiny_tokenizer(chat_template=chat_template, pieces=pieces)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
    }
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **(experts if family == "qwen3_moe" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
