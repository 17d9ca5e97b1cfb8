"""Holds the config of a server's model against that of ``model.path``.

Weights of the same names and shapes fit models that compute otherwise: Qwen2.5-7B and
Qwen2.5-Math-7B differ in the base of their rotary embeddings alone. Nothing else tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from siirl_dask.errors import ConfigError

_FILE = "config.json"
_NO_MATTER = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dtype",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys that change no logits, or that are looked at elsewhere: number types, end tokens, lengths."""
_SHOWN = 5


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Return the config of a model's folder, or of a name that this host has in its cache, as plain
    data with all its defaults. OSError or ValueError for one that cannot be read.
    """
    from transformers import AutoConfig  # takes a second

    config = AutoConfig.from_pretrained(
        model, revision=revision, local_files_only=True, trust_remote_code=False
    )
    written = json.dumps(config.to_dict(), default=str)
    # a server's JSON has no infinity, which layers with states have as a limit
    plain: dict[str, Any] = json.loads(written, parse_constant=str)
    return plain


def config_here(model: str) -> dict[str, Any] | None:
    """Return the config of a model's folder; None where this host has no such folder."""
    if not (Path(model) / _FILE).is_file():
        return None
    return read_config(model)


def check_config(path: str, found: Mapping[str, Any], server: str, cure: str) -> None:
    """Raise ConfigError, naming the ``server`` and the ``cure``, where its model's config says
    something else than that of the folder ``path``. Keys of one of them alone are another release's.
    A folder that this host has not, as the doctor's may be, is looked at where the engine is.
    """
    own = config_here(path)
    if own is None:
        return
    both = {name: value for name, value in found.items() if name in own}
    _refuse(_differences(own, both), path, server, cure)


def check_overrides(path: str, found: Mapping[str, Any], server: str, cure: str) -> None:
    """Raise ConfigError as ``check_config`` does, for keys that a server was started with other
    values of, also for those that the folder's config lacks.
    """
    own = None
    if found.keys() - _NO_MATTER:
        own = config_here(path)
    if own is not None:
        _refuse(_differences(own, found), path, server, cure)


def _refuse(differences: Iterator[str], path: str, server: str, cure: str) -> None:
    shown = ", ".join(islice(differences, _SHOWN))
    if shown:
        raise ConfigError(
            f"{server}: its model computes otherwise than the one in model.path={path!r}, whose "
            f"weights it would take: {shown}; {cure}"
        )


def _differences(own: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what ``found`` says otherwise."""
    for name in sorted(found.keys() - _NO_MATTER):
        expected = own.get(name)
        value = found[name]
        if isinstance(expected, dict) and isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _differences(expected, value))
        elif value != expected:
            yield f"{name} is {value!r:.60} there and {expected!r:.60} here"
