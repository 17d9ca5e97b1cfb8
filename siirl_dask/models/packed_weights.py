"""Weights that a folder keeps packed (quantized): a run does not train them, and ``siirl-dask unpack`` unpacks some."""

from __future__ import annotations

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config

UNPACKED = ("mxfp4", "fp8")
"""Methods of ``quantization_config`` that ``siirl-dask unpack`` knows."""


def packing_of(path: str) -> str | None:
    """Return how the weights of the model at ``path`` are packed: ``quant_method`` of its ``quantization_config``, or
    "unknown" without one. None for weights that are not packed, and without a ``config.json``.
    """
    config = read_config(path) or {}
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        packing = part.get("quantization_config") or part.get("compression_config")
        if isinstance(packing, dict):
            return str(packing.get("quant_method", "unknown"))
    return None


def check_not_packed(path: str) -> None:
    """Raise ConfigError for a model whose weights are packed: trainers and engines exchange unpacked ones."""
    method = packing_of(path)
    if method is None:
        return
    subject = f"model.path={path!r}: its weights are packed (quantization_config of quant_method {method!r})"
    if method in UNPACKED:
        raise ConfigError(f"{subject}; train an unpacked copy, written by `siirl-dask unpack {path} FOLDER`")
    raise ConfigError(
        f"{subject}; expected a model whose weights are float32, bfloat16 or float16, as its makers often publish "
        f"beside the packed one ({' and '.join(UNPACKED)} can be unpacked by `siirl-dask unpack`)"
    )
