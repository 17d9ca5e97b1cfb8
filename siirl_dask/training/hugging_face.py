"""Weights as the folder that transformers, vLLM and others load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from siirl_dask.config import Dtype
from siirl_dask.errors import ConfigError
from siirl_dask.pretrained import refused_by_name


def write_hugging_face(folder: Path, weights: Mapping[str, Tensor], base: str, dtype: Dtype) -> None:
    """Write ``weights``, by name and tied ones once, into ``folder`` with the config, the generation config and the
    tokenizer of the folder ``base``, which the weights were trained from. ConfigError when they are not of one model.
    """
    what = f"model.path={base!r}, which the checkpoint was trained from"
    with refused_by_name(base, what):
        model = _empty_model(base, getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    _check(weights, model, what)
    state = {name: tensor.to(model.dtype) for name, tensor in weights.items()}
    with _no_progress_bars():
        model.save_pretrained(folder, state_dict=state)  # which it empties
    tokenizer.save_pretrained(folder)


def _empty_model(base: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its weights."""
    config = AutoConfig.from_pretrained(base, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(base) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(base, local_files_only=True)
    return model


def _check(weights: Mapping[str, Tensor], model: PreTrainedModel, what: str) -> None:
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    if lacking := sorted(expected.keys() - weights.keys()):
        raise ConfigError(f"{what}: the checkpoint lacks {lacking[:5]}; is that folder another model by now?")
    if unknown := sorted(weights.keys() - expected.keys()):
        raise ConfigError(f"{what}: the checkpoint has {unknown[:5]}, which that model has not")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ConfigError(
                f"{what}: {name} has shape {list(weights[name].shape)} in the checkpoint and {list(shape)} there"
            )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()
