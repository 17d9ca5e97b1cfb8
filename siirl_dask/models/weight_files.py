"""Opens the ``*.safetensors`` of a model's folder on this machine; weights are read when they
are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from siirl_dask.errors import ConfigError
from siirl_dask.models.experts import joined


def open_weights(path: str) -> dict[str, Any]:
    """Return the open file of each weight by its name; ``file.get_tensor(name)`` reads it. Empty
    without files.

    The experts' tensors of a mixture are joined, as its parameters are. ConfigError for unreadable
    files.
    """
    return joined(open_tensors(path))


def open_tensors(path: str) -> dict[str, Any]:
    """Return the open file of each tensor by its name, as ``open_weights`` does, but with
    nothing joined.
    """
    try:
        opened: list[Any] = [
            safe_open(file, framework="pt") for file in sorted(Path(path).glob("*.safetensors"))
        ]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path={path!r}: its weights cannot be read: {error}") from error
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # the file is no mapping
