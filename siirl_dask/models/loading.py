"""Loads what a Hugging Face folder holds, and refuses, by name, a folder that does not hold it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from siirl_dask.errors import ConfigError


def load_pretrained(kind: Any, path: str, dtype: torch.dtype, what: str) -> PreTrainedModel:
    """The model in ``path`` as ``kind`` (a class of transformers such as AutoModelForCausalLM) loads it, all of its
    weights from the folder. ConfigError, which begins with ``what``, when it cannot be.
    """
    with refused_by_name(path, what):
        model, info = kind.from_pretrained(path, dtype=dtype, local_files_only=True, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{what}: its weights lack {missing}, which would be random numbers")
    return model  # type: ignore[no-any-return]


@contextmanager
def refused_by_name(path: str, what: str) -> Iterator[None]:
    """What transformers raises inside over the folder ``path`` becomes a ConfigError; it draws no progress bars."""
    if not Path(path).is_dir():
        raise ConfigError(f"{what}: no such folder; expected one that transformers loads")
    try:
        with no_progress_bars():
            yield
    except Exception as error:  # anything from OSError to KeyError for a folder it cannot load
        raise ConfigError(f"{what}: transformers cannot load it: {error}") from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws one for every file it reads or writes."""
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()
