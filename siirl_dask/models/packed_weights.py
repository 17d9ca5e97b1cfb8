"""Weights that a folder keeps packed (quantized): a run does not train them, and ``siirl-dask
unpack`` unpacks some.
"""

from __future__ import annotations

from typing import Any

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config
from siirl_dask.models.cache import open_model
from siirl_dask.models.remote import reached

PACKING_KEYS = ("quantization_config", "compression_config")
"""Keys of ``config.json``, or of the config of the model's text, that say how weights are packed."""
_OF_MODELOPT = "hf_quant_config.json"
UNPACKED = ("mxfp4", "fp8")
"""Methods of ``quantization_config`` that ``siirl-dask unpack`` knows."""


def packing_of(path: str) -> str | None:
    """Return how the weights of the model at ``path`` are packed: ``quant_method`` of its
    ``quantization_config``, or "unknown" without one. None for weights that are not packed, and
    without a ``config.json``.
    """
    packing = read_packing(path)
    if packing is None:
        return None
    return str(packing.get("quant_method", "unknown"))


def read_packing(path: str) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of the model at ``path``, or of its text; None without
    one. Where ``hf_quant_config.json`` says it instead, as of earlier releases of ModelOpt, which
    vLLM reads as well, ``quant_method`` is ``modelopt``.
    """
    config = read_config(path)
    if config is None:
        return None
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for key in PACKING_KEYS:
            packing = part.get(key)
            if isinstance(packing, dict):
                return packing
    with reached(path):
        fs, folder = open_model(path)
        of_modelopt = fs.exists(f"{folder}/{_OF_MODELOPT}")
    if of_modelopt:
        return {"quant_method": "modelopt"}
    return None


def check_not_packed(path: str) -> None:
    """Raise ConfigError for a model whose weights are packed: trainers and engines exchange
    unpacked ones.
    """
    method = packing_of(path)
    if method is None:
        return
    subject = (
        f"model.path={path!r}: its weights are packed (config.json or {_OF_MODELOPT} names "
        f"quant_method {method!r})"
    )
    if method in UNPACKED:
        raise ConfigError(
            f"{subject}; train an unpacked copy, written by `siirl-dask unpack {path} FOLDER`"
        )
    raise ConfigError(
        f"{subject}; expected a model whose weights are float32, bfloat16 or float16, as its "
        "makers often publish "
        f"beside the packed one ({' and '.join(UNPACKED)} can be unpacked by `siirl-dask unpack`)"
    )
