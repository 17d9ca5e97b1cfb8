"""Rotary embeddings whose frequencies would follow the longest row of a pass: a run pins them
(models/rotary.py).

With ``longrope`` (LongRoPE, arXiv:2402.13753; Phi-3.5-mini, Phi-4-mini) and ``dynamic``
transformers takes other frequencies for a whole pass as soon as one of its rows is longer than the
model's original context. Rows are packed into passes by the room that there is, and a sampler's
cache keeps keys of the earlier frequencies, so the log-probs of a row would depend on the rows
beside it.

Other libraries decide once, by the longest row that they are built for, or never. So a run has one
number,
``model.longest_row``: engines and trainers compute all rows with the frequencies of a row of that
length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import ModelConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config, read_settings

_LONGROPE = ("longrope", "su")  # its name in earlier configs
DYNAMIC = "dynamic"
_ORIGINAL = "original_max_position_embeddings"
_WITH_TABLE = (
    "biogpt",
    "codegen",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "mpt",
    "openai-gpt",
    "opt",
)
"""``model_type`` of those that have a table of positions, behind which their kernels read."""
_CHOOSES_BLOCKS = "minimax_m3"
"""Beginning of the ``model_type`` of those whose tokens see a choice of blocks."""
_SEES_ALL = "full_attention"
_PLACES = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, slots=True)
class FollowingFrequencies:
    """Rotary embeddings of a config, of all its layers or of one kind of them, that follow the
    longest row.
    """

    kind: str
    limit: int
    """Tokens up to which all rows have the same frequencies: the original context."""
    scaled: bool
    """Whether a factor of cosine and sine follows the longest row as well, as in PhiMoE."""

    def subject(self, model: ModelConfig) -> str:
        """Return the beginning of a sentence on the model that has them."""
        return (
            f"model.path={model.path!r}: its rotary frequencies (rope_type {self.kind!r}) follow "
            f"the longest row of a pass where that has more than {self.limit} tokens"
        )


def check_longest_row(model: ModelConfig, longest: int) -> None:
    """Raise ConfigError for a model whose frequencies follow the longest row, and cannot be pinned
    for this run.

    So is one whose tokens see a choice of those before them, with rows longer than what is chosen,
    and one with a table of positions that is shorter than a row.
    ``longest`` is the longest row of the run. Does nothing without a ``config.json`` at
    ``model.path``.
    """
    check_sees_all(model, longest)
    _check_has_places(model, longest)
    for found in following(model.path):
        subject = found.subject(model)
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
                f"{subject}; they are pinned for model.longest_row={model.longest_row}, and "
                f"data.max_prompt_length + rollout.max_response_length is {longest}: expected at "
                "most model.longest_row. A larger one gives other frequencies, so a model that "
                "was trained with this one becomes another model"
            )


def check_sees_all(model: ModelConfig, longest: int) -> None:
    """Raise ConfigError where a token sees a choice of those before it (DeepSeek-V3.2, GLM-5,
    MiniMax-M3), and the ``longest`` row of a run has more: tiny models of all three were off by
    nats there.
    """
    chosen = tokens_to_choose(model.path)
    if chosen is not None and longest > chosen:
        raise ConfigError(
            f"model.path={model.path!r}: a token sees {chosen} of those before it, which an indexer "
            "chooses (index_topk, or index_topk_blocks), and log-probs of longer rows are not those "
            "of transformers here: data.max_prompt_length + rollout.max_response_length is "
            f"{longest}, expected at most {chosen}"
        )


def tokens_to_choose(path: str) -> int | None:
    """Return the tokens of those before it that a token sees; None: all, or all in a window."""
    config = read_config(path)
    if config is None:
        return None
    chosen = config.get("text_config", config).get("index_topk")
    if isinstance(chosen, int):
        return chosen
    if not str(config.get("model_type")).startswith(_CHOOSES_BLOCKS):
        return None
    settings = read_settings(path)  # published ones have the numbers under several names
    if settings is None:
        return None
    text = settings.get_text_config()
    if all(kind == _SEES_ALL for kind in text.layer_types):
        return None
    blocks: int = text.index_topk_blocks
    return blocks * int(text.index_block_size)


def _check_has_places(model: ModelConfig, longest: int) -> None:
    """Raise ConfigError where a row may have tokens behind the end of a model's table of positions:
    an IndexError on a CPU, and on an accelerator an error of a kernel, at the first such row.
    """
    config = read_config(model.path)
    if config is None or config.get("model_type") not in _WITH_TABLE:
        return
    for key in _PLACES:
        places = config.get(key)
        if isinstance(places, int) and longest > places:
            raise ConfigError(
                f"model.path={model.path!r}: it has {places} positions ({key}), and data."
                f"max_prompt_length + rollout.max_response_length is {longest}: expected at most "
                "that"
            )


def check_frequencies_are_pinned(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose frequencies nothing pins here for rows of
    ``model.longest_row`` tokens: those of ``dynamic``, and those with a scale that follows the
    longest row as well.
    """
    for found in following(model.path):
        longest = 0
        if model.longest_row is not None:
            longest = model.longest_row
        if longest <= found.limit:
            continue
        subject = found.subject(model)
        if found.kind == DYNAMIC:
            why = (
                f"an engine may compute them for {found.limit} tokens alone, and transformers for "
                "each pass anew"
            )
        elif found.scaled:
            why = (
                "so does a scale of theirs (long_mscale), which transformers computes for each "
                "pass anew"
            )
        else:
            continue
        raise ConfigError(
            f"{subject}; {why}. model.longest_row (data.max_prompt_length + "
            f"rollout.max_response_length) is {longest}: expected at most {found.limit}"
        )


def following(path: str) -> Iterator[FollowingFrequencies]:
    """Yield the rotary embeddings of the model at ``path`` that follow the longest row; none
    without a config.
    """
    config = read_config(path)
    if config is None:
        return
    text = config.get("text_config", config)
    for settings in rotary_settings(text):
        kind = settings.get("rope_type", settings.get("type"))
        limit = _original_context(kind, settings, text)
        if limit is not None:
            yield FollowingFrequencies(
                str(kind), limit, scaled=any(key.endswith("mscale") for key in settings)
            )


def rotary_settings(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config's settings of rotary embeddings: of all layers, or of each kind of layers."""
    for key in ("rope_parameters", "rope_scaling"):
        settings = text.get(key)
        if isinstance(settings, Mapping):
            yield settings
            yield from (part for part in settings.values() if isinstance(part, Mapping))


def _original_context(
    kind: object, settings: Mapping[str, Any], text: Mapping[str, Any]
) -> int | None:
    """Return the tokens up to which all rows have the same frequencies; None for a kind that
    does not look at rows.
    """
    original = None
    if kind in _LONGROPE:
        original = text.get(_ORIGINAL, settings.get(_ORIGINAL, text.get("max_position_embeddings")))
    elif kind == DYNAMIC:
        original = text.get("max_position_embeddings")
    if isinstance(original, int):
        return original
    return None
