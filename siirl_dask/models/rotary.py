"""Finds models whose rotary frequencies follow the longest row of a pass, and refuses rows for which they would.

With ``longrope`` (Phi-3.5-mini, Phi-4-mini) and ``dynamic`` transformers takes other frequencies for a whole pass as
soon as one of its rows is longer than the model's original context. Rows are packed into passes by the room that there
is, and a sampler's cache keeps keys of the earlier frequencies, so the log-probs of a row would depend on the rows
beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config

_LONGROPE = ("longrope", "su")  # its name in earlier configs
_DYNAMIC = "dynamic"


def check_rows_are_alike(path: str, longest: int) -> None:
    """Raise ConfigError where the frequencies of the model at ``path`` depend on whether a row has ``longest`` tokens.

    ``longest`` is the longest row of the run. Does nothing without a ``config.json`` at ``path``.
    """
    config = read_config(path)
    if config is None:
        return
    text = config.get("text_config", config)
    for settings in _rotary_settings(text):
        kind = settings.get("rope_type", settings.get("type"))
        limit = _original_context(kind, settings, text)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"model.path={path!r}: its rotary frequencies (rope_type {kind!r}) follow the longest row of a pass "
                f"where that has more than {limit} tokens, so a row's log-probs would depend on the rows beside it; "
                f"data.max_prompt_length + rollout.max_response_length is {longest}: expected at most {limit}"
            )


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
        key = "original_max_position_embeddings"
        original = text.get(key, settings.get(key, text.get("max_position_embeddings")))
    elif kind == _DYNAMIC:
        original = text.get("max_position_embeddings")
    return original if isinstance(original, int) else None
