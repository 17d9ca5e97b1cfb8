"""Loads models from Hugging Face folders; a folder that cannot be loaded is a ConfigError with
its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from siirl_dask.errors import ConfigError, said_by
from siirl_dask.models.cache import check_no_adapters
from siirl_dask.models.rotary import pin_frequencies
from siirl_dask.models.weight_names import tied_apart

_NO_LIMIT = (0.0, float("inf"))


def model_class(path: str, subject: str) -> Any:
    """Return the class of transformers that loads the generating model in ``path``, as
    ``class_of_config`` says.

    ConfigError, beginning with ``subject``, when its config cannot be read.
    """
    with refused_by_name(path, subject):
        return class_of_config(
            AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        )


def sees_images(path: str, subject: str) -> bool:
    """Return whether the model in ``path`` is an image-text model. ConfigError as of
    ``model_class``.
    """
    return model_class(path, subject) is AutoModelForImageTextToText


def has_image_part(path: str, subject: str) -> bool:
    """Return whether the model in ``path`` has a part for images, also where transformers takes
    its text for a model of its own. ConfigError as of ``model_class``.
    """
    with refused_by_name(path, subject):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return type(config) in cast(Any, AutoModelForImageTextToText)._model_mapping


def class_of_config(config: PretrainedConfig) -> Any:
    """Return AutoModelForImageTextToText for a model that has no other class,
    AutoModelForCausalLM for any other.
    """
    text = cast(Any, AutoModelForCausalLM)
    images = cast(Any, AutoModelForImageTextToText)
    if type(config) in images._model_mapping and type(config) not in text._model_mapping:
        return images
    return text


def load_pretrained(
    kind: Any,
    path: str,
    dtype: torch.dtype,
    subject: str,
    *,
    unused: tuple[str, ...] = (),
    longest_row: int | None = None,
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """Load the model in ``path`` with ``kind``, a class of transformers such as
    AutoModelForCausalLM.

    ``config`` takes the place of the folder's own. Rotary frequencies are pinned for rows of
    ``longest_row`` tokens, as ``pin_frequencies`` says. ConfigError, beginning with ``subject``,
    when it cannot be loaded, has adapters beside its weights, or lacks some of these, but for those
    whose names begin with one of ``unused``. Code in the folder is not run; without a word on it transformers
    would ask on standard input whether to run it.
    """
    check_no_adapters(path)
    with refused_by_name(path, subject):
        model, info = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    if missing:
        raise ConfigError(f"{subject}: its weights lack {missing}, which would be random numbers")
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for other in sorted(tied.keys() - model.all_tied_weights_keys.keys()):
        raise tied_apart(subject, tied[other], other)
    correct_modules(model)
    pin_frequencies(model, longest_row, subject)
    return model  # type: ignore[no-any-return]


@contextmanager
def refused_by_name(path: str, subject: str) -> Iterator[None]:
    """Turn errors of transformers over the folder ``path`` into a ConfigError beginning with
    ``subject``.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"{subject}: no such folder; expected one that transformers loads")
    try:
        with no_progress_bars():
            yield
    except Exception as error:  # transformers raises anything from OSError to KeyError here
        raise ConfigError(f"{subject}: transformers cannot load it: {said_by(error)}") from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, one for every file, inside the ``with`` block."""
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


def correct_modules(model: nn.Module) -> None:
    """Set a state-space layer's limits of time steps to those of its config, or to none where that
    has none.

    Nemotron-H's and Zamba2's layers take ``time_step_min`` for the least, and only where they
    compute a whole row: one token after the other, as when sampling, transformers applies no limit,
    and neither do engines. Nemotron-H's ``time_step_limit`` is 0 to infinity.
    """
    for module in model.modules():
        if hasattr(module, "time_step_limit") and hasattr(module, "config"):
            layer = cast(Any, module)
            layer.time_step_limit = tuple(getattr(layer.config, "time_step_limit", _NO_LIMIT))
