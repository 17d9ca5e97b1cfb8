"""The end tokens of a model, and how many tokens it knows, as its folder says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config


def read_vocabulary(path: str) -> int | None:
    """Return the number of tokens of a model's embedding, as its ``config.json`` has it; None
    where it has none.
    """
    config = read_config(path)
    if config is None:
        return None
    vocabulary = config.get("text_config", config).get("vocab_size")
    if isinstance(vocabulary, int):
        return vocabulary
    return None


def read_generation_config(path: str) -> GenerationConfig | None:
    """Read the generation config in a model's folder; where there is none, the end tokens that
    transformers would take from its ``config.json``. None without either.
    """
    if Path(path, "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    config = read_config(path)
    if config is None or config.get("model_type") not in CONFIG_MAPPING:
        return None
    model = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    ends = getattr(model, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.get_text_config(), "eos_token_id", None)
    return GenerationConfig(eos_token_id=ends)


def end_tokens(
    config: GenerationConfig | None, own: int | None, path: str, vocabulary: int | None
) -> frozenset[int]:
    """Return the end tokens of the model's generation config, and its tokenizer's ``own``.
    ConfigError for what are no ids, and for a token that is none of the ``vocabulary`` of the
    model's embedding: it can never be sampled, and no row be padded with it. None: not known.
    """
    configured = config.eos_token_id if config is not None else None
    ends = [configured] if isinstance(configured, int) else list(configured or [])
    if not all(isinstance(end, int) for end in ends):
        raise ConfigError(
            f"model.path={path!r}: its generation_config.json, or else config.json, has "
            f"eos_token_id={configured!r}: "
            "expected ids of tokens"
        )
    _check_embedded(ends, vocabulary, f"model.path={path!r}: its generation config")
    if own is not None:
        _check_embedded([own], vocabulary, f"model.path={path!r}: its tokenizer")
        ends.append(own)
    return frozenset(ends)


def _check_embedded(ends: Sequence[int], vocabulary: int | None, subject: str) -> None:
    if vocabulary is None:
        return
    for end in ends:
        if not 0 <= end < vocabulary:
            raise ConfigError(
                f"{subject} ends responses with token {end}, and the model's embedding has "
                f"{vocabulary} tokens (vocab_size): expected eos_token_id of these; correct it in "
                "generation_config.json (without one, in config.json) or in the tokenizer's files, "
                "or add the token to the model (resize_token_embeddings of transformers)"
            )
