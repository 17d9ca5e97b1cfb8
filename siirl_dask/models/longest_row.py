"""Rotary embeddings whose frequencies would follow the longest row of a pass: a run pins them (models/rotary.py).

With ``longrope`` (LongRoPE, arXiv:2402.13753; Phi-3.5-mini, Phi-4-mini) and ``dynamic`` transformers takes other
frequencies for a whole pass as soon as one of its rows is longer than the model's original context. Rows are packed
into passes by the room that there is, and a sampler's cache keeps keys of the earlier frequencies, so the log-probs of
a row would depend on the rows beside it.

vLLM decides once: by its ``max_model_len`` for ``longrope``, and never for ``dynamic``, whose frequencies it computes
for the original context. So a run has one number, ``model.longest_row``: engines and trainers compute all rows with the
frequencies of a row of that length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import ModelConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config

_LONGROPE = ("longrope", "su")  # its name in earlier configs
_DYNAMIC = "dynamic"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class _Following:
    """Rotary embeddings of a config, of all its layers or of one kind of them, that follow the longest row."""

    kind: str
    limit: int
    """Tokens up to which all rows have the same frequencies: the original context."""
    scaled: bool
    """Whether a factor of cosine and sine follows the longest row as well, as in PhiMoE."""


def check_longest_row(model: ModelConfig, longest: int, *, engine_length: int | None = None) -> None:
    """Raise ConfigError for a model whose frequencies follow the longest row, and cannot be pinned for this run.

    ``longest`` is the longest row of the run, and ``engine_length`` a ``max_model_len`` of vLLM that the user sets.
    Does nothing without a ``config.json`` at ``model.path``.
    """
    for found in _following(model.path):
        subject = _subject(model, found)
        if model.longest_row is None and longest > found.limit:
            raise ConfigError(
                f"{subject}, and the run's rows have up to {longest} (data.max_prompt_length + "
                "rollout.max_response_length): give this model the run's longest row as well, "
                "longest_row: ${model.longest_row}"
            )
        if model.longest_row is None:
            continue
        if longest > model.longest_row:
            raise ConfigError(
                f"{subject}; they are pinned for model.longest_row={model.longest_row}, and data.max_prompt_length + "
                f"rollout.max_response_length is {longest}: expected at most model.longest_row. A larger one gives "
                "other frequencies, so a model that was trained with this one becomes another model"
            )
        if engine_length is not None and (engine_length > found.limit) != (model.longest_row > found.limit):
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.max_model_len={engine_length}: {subject}, and vLLM goes by max_model_len; "
                f"the trainer has model.longest_row={model.longest_row}, which is on the other side of {found.limit}: "
                "leave max_model_len out"
            )


def check_frequencies_are_pinned(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose frequencies nothing pins here for rows of ``model.longest_row`` tokens: those
    of ``dynamic``, and those with a scale that follows the longest row as well.
    """
    for found in _following(model.path):
        longest = model.longest_row or 0
        if longest <= found.limit:
            continue
        subject = _subject(model, found)
        if found.kind == _DYNAMIC:
            why = f"vLLM computes them for {found.limit} tokens alone, and transformers for each pass anew"
        elif found.scaled:
            why = "so does a scale of theirs (long_mscale), which transformers computes for each pass anew"
        else:
            continue
        raise ConfigError(
            f"{subject}; {why}. model.longest_row (data.max_prompt_length + rollout.max_response_length) is {longest}: "
            f"expected at most {found.limit}"
        )


def check_frequencies_of_sglang(model: ModelConfig) -> None:
    """Raise ConfigError for rows of SGLang beyond the original context, where it looks at the longest of a pass."""
    for found in _following(model.path):
        if (model.longest_row or 0) > found.limit:
            raise ConfigError(
                f"rollout.engine=sglang: {_subject(model, found)}, which no option of SGLang pins; take "
                "rollout.engine=vllm or transformers, or rows of at most that many tokens, prompt and response"
            )


def engine_length(model: ModelConfig) -> int | None:
    """Return the ``max_model_len`` with which vLLM takes the trainer's frequencies; None where any will do."""
    kinds = {found.kind for found in _following(model.path)}
    return model.longest_row if kinds - {_DYNAMIC} else None


def _subject(model: ModelConfig, found: _Following) -> str:
    return (
        f"model.path={model.path!r}: its rotary frequencies (rope_type {found.kind!r}) follow the longest row of a "
        f"pass where that has more than {found.limit} tokens"
    )


def _following(path: str) -> Iterator[_Following]:
    """Yield the rotary embeddings of the model at ``path`` that follow the longest row; none without a config."""
    config = read_config(path)
    if config is None:
        return
    text = config.get("text_config", config)
    for settings in _rotary_settings(text):
        kind = settings.get("rope_type", settings.get("type"))
        limit = _original_context(kind, settings, text)
        if limit is not None:
            yield _Following(str(kind), limit, scaled=any(key.endswith("mscale") for key in settings))


def _rotary_settings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config's settings of rotary embeddings: of all layers, or of each kind of layers."""
    for key in ("rope_parameters", "rope_scaling"):
        settings = text.get(key)
        if isinstance(settings, Mapping):
            yield settings
            yield from (part for part in settings.values() if isinstance(part, Mapping))


def _original_context(kind: object, settings: Mapping[str, Any], text: Mapping[str, Any]) -> int | None:
    """Return the tokens up to which all rows have the same frequencies; None for a kind that does not look at rows."""
    original = None
    if kind in _LONGROPE:
        original = text.get(_ORIGINAL, settings.get(_ORIGINAL, text.get("max_position_embeddings")))
    elif kind == _DYNAMIC:
        original = text.get("max_position_embeddings")
    return original if isinstance(original, int) else None
