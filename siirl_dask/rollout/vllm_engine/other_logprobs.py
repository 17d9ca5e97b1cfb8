"""Models of which vLLM computes other log-probs than transformers, and so than the trainer.

What vLLM 0.32 was found to do with small models of these families, on CPUs. Where it fails as it
starts, or leaves weights out, it says so by itself; these would only show as ``mismatch/kl`` of a
run's first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siirl_dask.config import ModelConfig
from siirl_dask.devices import DeviceKind
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config
from siirl_dask.models.longest_row import DYNAMIC, following, rotary_settings

OTHER_LOGPROBS = {
    "doge": "it leaves out the masks that follow from the weights (dynamic mask attention)",
    "gemma3n": "it was compared without images alone (gemma3n_text), where it leaves the embeddings of each layer out",
    "gemma3n_text": "it leaves the embeddings of each layer out (embed_tokens_per_layer)",
    "jetmoe": "its neighbouring heads share keys, those of the model do so in turn",
}
"""Families, by ``model_type``, and why the log-probs differ."""
OTHER_LOGPROBS_ON_CPU = {
    "ernie4_5_moe": "its router leaves the experts' biases out (e_score_correction_bias)"
}
"""Families that differ with vLLM on CPUs alone."""
FAILS_ON_CPU = ("falcon_h1", "granitemoehybrid", "mamba2", "zamba2")
"""Families, by ``model_type``, whose state-space layers fail on CPUs in a batch with a row of several
chunks."""
OTHER_WINDOWS = {
    "cohere2": "vLLM's are a token longer",
    "qwen2_moe": "vLLM computes the whole row",
}
"""Families, by ``model_type``, and what vLLM does with windows that are shorter than the longest
row."""


def check_logprobs_of_vllm(path: str, longest: int, kind: DeviceKind | None = None) -> None:
    """Raise ConfigError for a model in ``path`` of which vLLM computes other log-probs than the
    trainer.

    ``longest`` is the longest row of the run, in tokens, 0 where that was checked; ``kind`` is the
    device's, None where it is not known yet. Does nothing without a ``config.json``.
    """
    config = read_config(path)
    if config is None:
        return
    family = str(config.get("model_type"))
    difference = OTHER_LOGPROBS.get(family)
    if difference is None and kind is DeviceKind.CPU:
        difference = OTHER_LOGPROBS_ON_CPU.get(family)
    if difference is not None:
        where = "" if family in OTHER_LOGPROBS else " on a CPU"
        raise ConfigError(
            f"model.path={path!r}: vLLM{where} computes other log-probs of {family} than "
            f"transformers, and so than the trainer: {difference}; take rollout.engine=transformers"
        )
    if family in FAILS_ON_CPU and kind is DeviceKind.CPU:
        raise ConfigError(
            f"model.path={path!r}: the state-space layers of {family} fail in vLLM on a CPU where "
            "rows have several chunks; take rollout.engine=transformers"
        )
    places = _rotary_places(config)
    if places is not None and places < longest:
        raise ConfigError(
            f"model.path={path!r}: vLLM has rotary frequencies of rope_type 'yarn' for {places} "
            "tokens (factor * original_max_position_embeddings) and reads past them: "
            f"data.max_prompt_length + rollout.max_response_length is {longest}, expected at most "
            f"{places}; or take rollout.engine=transformers"
        )
    window = _window(config)
    if family in OTHER_WINDOWS and window is not None and window < longest:
        raise ConfigError(
            f"model.path={path!r}: {family} has windows of {window} tokens, and "
            f"{OTHER_WINDOWS[family]}, so that its log-probs of longer rows are not the trainer's: "
            f"data.max_prompt_length + rollout.max_response_length is {longest}, expected at most "
            f"{window}; or take rollout.engine=transformers"
        )


def _rotary_places(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of a row for which vLLM has rotary frequencies of YaRN; None for other
    kinds, whose rows are within ``max_position_embeddings`` there.
    """
    for settings in rotary_settings(config.get("text_config", config)):
        if settings.get("rope_type", settings.get("type")) != "yarn":
            continue
        original = settings.get("original_max_position_embeddings")
        factor = settings.get("factor")
        if isinstance(original, int) and isinstance(factor, (int, float)):
            return int(original * factor)
    return None


def _window(config: Mapping[str, Any]) -> int | None:
    # which has windows only where its config says so
    without_key = config.get("model_type") != "qwen2_moe"
    if not config.get("use_sliding_window", without_key):
        return None
    window = config.get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def check_engine_length(
    model: ModelConfig,
    length: int,
    key: str = "rollout.vllm.engine_kwargs.max_model_len",
    cure: str = "leave max_model_len out",
) -> None:
    """Raise ConfigError for a ``max_model_len`` of the user's, given by ``key``, with which vLLM
    takes other frequencies than the trainer.
    """
    for found in following(model.path):
        if model.longest_row is None:
            continue
        if (length > found.limit) != (model.longest_row > found.limit):
            raise ConfigError(
                f"{key}={length}: {found.subject(model)}, and "
                "vLLM goes by max_model_len; the trainer has "
                f"model.longest_row={model.longest_row}, which is on the other side of "
                f"{found.limit}: {cure}"
            )


def engine_length(model: ModelConfig) -> int | None:
    """Return the ``max_model_len`` with which vLLM takes the trainer's frequencies; None where
    any will do.
    """
    kinds = {found.kind for found in following(model.path)}
    return model.longest_row if kinds - {DYNAMIC} else None
