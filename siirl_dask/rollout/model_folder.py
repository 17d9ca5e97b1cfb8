"""Reads what an engine with loaders of its own must know of a model's folder before it loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from siirl_dask.config import ModelConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.loading import has_image_part, sees_images
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from siirl_dask.rollout.weight_loading import WeightLoader


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder, without its weights."""

    parameters: WeightLoader
    tokenizer: HuggingFaceTokenizer
    end_tokens: list[int]
    sees_images: bool
    has_image_part: bool
    """Whether libraries that go by ``config.json`` build a part for images, which those models
    have as well whose text alone is trained."""


def read_model_folder(model: ModelConfig) -> ModelFolder:
    """Read a model's folder. ConfigError for one that transformers does not load."""
    path = model.path
    key = f"model.path={path!r}"
    if not Path(path).is_dir():
        raise ConfigError(f"{key}: no such folder; expected one that transformers loads")
    try:
        parameters = WeightLoader.of_folder(path)
        tokenizer = load_tokenizer(path, key)
    except Exception as error:
        # transformers raises anything from OSError to KeyError for a folder it cannot load
        raise ConfigError(f"{key}: transformers cannot load it: {error}") from error
    tokenizer = tokenizer.with_options(model)
    return ModelFolder(
        parameters=parameters,
        tokenizer=tokenizer,
        end_tokens=sorted(tokenizer.end_tokens),
        sees_images=sees_images(path, key),
        has_image_part=has_image_part(path, key),
    )
