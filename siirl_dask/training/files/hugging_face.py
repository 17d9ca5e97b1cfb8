"""Writes weights as a Hugging Face folder for transformers, vLLM and others, and adapters as a folder for peft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

from siirl_dask.config import Dtype, Part, TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.images.families import FAMILIES
from siirl_dask.models.adapters import is_adapter
from siirl_dask.models.architecture import read_config
from siirl_dask.models.loading import class_of_config, load_pretrained, model_class, no_progress_bars, refused_by_name
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.training.model.lora import merged, peft_config
from siirl_dask.training.parts import stays

_OF_IMAGES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
"""Files of a folder that say how images become a model's input."""
_CPU = torch.device("cpu")
_PEFT_PREFIX = "base_model.model."  # every name in peft's file begins with it


def write_hugging_face(folder: Path, weights: Mapping[str, Tensor], base: str, dtype: Dtype) -> None:
    """Write ``weights`` (by name, tied ones once) to ``folder`` with the configs, the tokenizer and the files of images
    of ``base``.

    ``base`` is the folder that the weights were trained from. ConfigError when the two are not of one model.
    """
    subject = _subject(base)
    with refused_by_name(base, subject):
        model = _empty_model(base, torch_dtype(dtype, _CPU))
        tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    _check(weights, model, subject)
    state = {name: tensor.to(model.dtype) for name, tensor in weights.items()}
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=state)  # it empties ``state``
    tokenizer.save_pretrained(folder)
    for name in _OF_IMAGES:
        if (Path(base) / name).is_file():
            copyfile(Path(base) / name, folder / name)


def write_adapters(
    folder: Path, adapters: Mapping[str, Tensor], trainer: TrainerConfig, base: str, dtype: Dtype
) -> None:
    """Write ``adapters``, which ``trainer`` made for the model in ``base``, to ``folder`` in peft's format.

    ConfigError when ``adapters`` has other parameters as well.
    """
    if others := sorted(name for name in adapters if not is_adapter(name)):
        raise ConfigError(f"{_subject(base)}: beside adapters the checkpoint has {others}: leave out --adapter")
    layers = {name.rsplit(".", 2)[0] for name in adapters}  # ...q_proj.lora_A.weight
    several = (read_config(base) or {}).get("model_type") in FAMILIES  # a name may be of decoder and tower alike
    targets = sorted(layers if several else {layer.rpartition(".")[2] for layer in layers})
    config = peft_config(trainer.lora.rank, trainer.lora.alpha, targets, base)
    config.inference_mode = True
    config.save_pretrained(folder)
    named = {_PEFT_PREFIX + name: tensor.to(torch_dtype(dtype, _CPU)) for name, tensor in adapters.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})


def with_base(adapters: Mapping[str, Tensor], trainer: TrainerConfig, base: str) -> dict[str, Tensor]:
    """Merge ``adapters`` with the weights of the folder ``base``, in float32. ConfigError when they do not fit."""
    subject = _subject(base)
    model = load_pretrained(model_class(base, subject), base, torch.float32, subject)
    named = {**dict(model.named_parameters()), **adapters}
    try:
        return dict(merged(named, trainer.lora.alpha / trainer.lora.rank, torch.device("cpu")))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{subject}: the checkpoint's adapters do not fit it; is that folder another model by now? {error}"
        ) from error


def with_frozen(weights: Mapping[str, Tensor], parts: Sequence[Part], base: str) -> dict[str, Tensor]:
    """Return ``weights`` and, where they lack any of ``parts``, which did not learn, those of the folder ``base``."""
    subject = _subject(base)
    model = load_pretrained(model_class(base, subject), base, torch.float32, subject)
    family = FAMILIES.get(model.config.model_type)
    frozen = {name: each.detach() for name, each in model.named_parameters() if stays(name, parts, family)}
    return {**frozen, **weights}


def _subject(base: str) -> str:
    return f"model.path={base!r}, which the checkpoint was trained from"


def _empty_model(base: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on the meta device, without weights."""
    config = AutoConfig.from_pretrained(base, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = class_of_config(config).from_config(config, dtype=dtype)
    if (Path(base) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(base, local_files_only=True)
    return model


def _check(weights: Mapping[str, Tensor], model: PreTrainedModel, subject: str) -> None:
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    if lacking := sorted(expected.keys() - weights.keys()):
        raise ConfigError(f"{subject}: the checkpoint lacks {lacking[:5]}; is that folder another model by now?")
    if unknown := sorted(weights.keys() - expected.keys()):
        raise ConfigError(f"{subject}: the checkpoint has {unknown[:5]}, which that model has not")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ConfigError(
                f"{subject}: {name} has shape {list(weights[name].shape)} in the checkpoint and {list(shape)} there"
            )
