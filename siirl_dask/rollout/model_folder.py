"""Reads what an engine with loaders of its own must know of a model's folder before it loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from siirl_dask.errors import ConfigError
from siirl_dask.models.loading import sees_images
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer, end_tokens
from siirl_dask.rollout.weight_loading import WeightLoader


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder, without its weights."""

    parameters: WeightLoader
    tokenizer: HuggingFaceTokenizer
    end_tokens: list[int]
    sees_images: bool


def read_model_folder(path: str) -> ModelFolder:
    """Read a model's folder. ConfigError for one that transformers does not load."""
    key = f"model.path={path!r}"
    if not Path(path).is_dir():
        raise ConfigError(f"{key}: no such folder; expected one that transformers loads")
    try:
        parameters = WeightLoader.of_folder(path)
        tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True), path)
    except Exception as error:  # transformers raises anything from OSError to KeyError for a folder it cannot load
        raise ConfigError(f"{key}: transformers cannot load it: {error}") from error
    config = GenerationConfig.from_pretrained(path) if Path(path, "generation_config.json").is_file() else None
    return ModelFolder(parameters, tokenizer, sorted(end_tokens(config, tokenizer)), sees_images(path, key))
