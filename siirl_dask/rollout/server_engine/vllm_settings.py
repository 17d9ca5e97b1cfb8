"""Settings of a server of vLLM 0.32 by which its samples or log-probs would be others than the
trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import Dtype


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting, where the server's description of itself has it."""

    path: tuple[str, ...]
    allowed: tuple[Any, ...]
    """Values with which its samples are the trainer's."""
    flag: str
    reason: str
    or_model_type: bool = False
    """Whether the number type that the model is computed in is allowed as well."""


_AUTO = ("auto",)
_SETTINGS = (
    _Setting(
        ("model_config", "quantization"),
        (None,),
        "--quantization",
        "its log-probs are those of weights with fewer bits than the trainer's",
    ),
    _Setting(
        ("cache_config", "cache_dtype"),
        _AUTO,
        "--kv-cache-dtype",
        "its log-probs follow from keys and values with fewer bits than the trainer's",
        or_model_type=True,
    ),
    _Setting(
        ("cache_config", "mamba_cache_dtype"),
        (*_AUTO, str(Dtype.float32)),
        "--mamba-cache-dtype",
        "its log-probs follow from states of another number type than the trainer's",
        or_model_type=True,
    ),
    _Setting(
        ("cache_config", "mamba_ssm_cache_dtype"),
        (*_AUTO, str(Dtype.float32)),
        "--mamba-ssm-cache-dtype",
        "its log-probs follow from states of another number type than the trainer's",
        or_model_type=True,
    ),
    _Setting(
        ("model_config", "model_class_overrides"),
        ({},),
        "--model-class-overrides",
        "its model is computed by another class",
    ),
    _Setting(
        ("parallel_config", "enable_eplb"),
        (False,),
        "--enable-eplb",
        "it moves experts, and takes new weights for the places that they had at first",
    ),
    _Setting(
        ("watermark_config",),
        (None,),
        "--watermark-config",
        "it draws tokens in another way than their probabilities say",
    ),
    _Setting(
        ("speculative_config",),
        (None,),
        "--speculative-config",
        "it drafts tokens, and draws them in another way than a row's seed says",
    ),
    _Setting(
        ("kv_transfer_config",),
        (None,),
        "--kv-transfer-config and --kv-offloading-size",
        "it has a place for keys and values outside its cache, which would stay there when it gets "
        "new weights",
    ),
)
_PRECISION = "VLLM_FLOAT32_MATMUL_PRECISION"
_WHOLE = "highest"


def refusal_of(described: Mapping[str, Any], dtype: str) -> str | None:
    """Return the first setting by which a server's samples would be others, with the cure; None where
    there is none. ``described`` is what it says of itself, ``dtype`` the number type that it computes
    in. KeyError and TypeError for another form.
    """
    for setting in _SETTINGS:
        found = described["vllm_config"]
        for name in setting.path:
            found = found[name]
        allowed = setting.allowed
        if setting.or_model_type:
            allowed = (*allowed, dtype)
        if found not in allowed:
            return f"{setting.reason} ({setting.path[-1]} is {found!r:.60}); start it without {setting.flag}"
    precision = described.get("vllm_env", {}).get(_PRECISION, _WHOLE)
    if dtype == Dtype.float32 and precision != _WHOLE:
        return (
            f"its products of float32 have fewer bits than the trainer's ({_PRECISION} is "
            f"{precision!r:.60}); start it without that variable"
        )
    return None
