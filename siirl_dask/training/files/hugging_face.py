"""Writes weights as a Hugging Face folder for transformers, vLLM and others, and adapters as a
folder for peft.

The folder is that of the base with other weights: what is no weight is copied as it is, since
another version of transformers, or another reader, takes what this one would write for another
model. In ``config.json`` the type of the numbers is changed, where that is another one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils.hub import CHAT_TEMPLATE_DIR

from siirl_dask.config import Dtype, TrainerConfig, VisionPart
from siirl_dask.errors import ConfigError
from siirl_dask.images.families import FAMILIES
from siirl_dask.models.adapter_folder import PREFIX, WEIGHTS
from siirl_dask.models.adapters import is_adapter
from siirl_dask.models.architecture import read_config
from siirl_dask.models.loading import (
    class_of_config,
    load_pretrained,
    model_class,
    no_progress_bars,
    refused_by_name,
)
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.packed_weights import PACKING_KEYS, read_packing
from siirl_dask.models.remote import HUB, hub_name, is_of_weights
from siirl_dask.models.shapes import StoredTensor, stored_tensors
from siirl_dask.models.weight_files import open_tensors
from siirl_dask.models.weight_names import (
    STORED_TYPES,
    FileNames,
    finer,
    parameter_types,
    read_stored,
    stored_parameters,
    unknown_names,
)
from siirl_dask.training.model.lora import merged, peft_config
from siirl_dask.training.parts import stays

_CPU = torch.device("cpu")
_CONFIG = "config.json"
_NOT_OF_A_MODEL = (
    "adapter_config.json",
)  # with which transformers looks for adapters beside the weights
_SHARD = "5GB"


def write_hugging_face(
    folder: Path,
    weights: Mapping[str, Tensor],
    base: str,
    dtype: Dtype,
    *,
    in_base: Mapping[str, StoredTensor] | None = None,
    as_stored: bool = False,
) -> None:
    """Write ``weights`` (by name, tied ones once) to ``folder``, with all files of ``base`` that
    hold none.

    ``base`` is the folder that the weights were trained from; buffers that are saved with weights
    (``weight_buffers``) and tensors of other parts (``weights_of_others``) are taken from it.
    ``in_base`` are its tensors by name, where its files of weights may not have come; None: they
    are there. Numbers are ``dtype``, and with ``as_stored`` of the type in ``base`` where that is
    finer. Buffers have the base's. ConfigError when the two are not of one model.
    """
    subject = _subject(base)
    with refused_by_name(base, subject):
        model = model_without_weights(base, torch_dtype(dtype, _CPU))
    _check(weights, model, subject)
    if in_base is None:
        in_base = stored_tensors(base)
    types = parameter_types(model, in_base)
    state = _buffers_of(base, model)
    for name, buffer in state.items():
        state[name] = buffer.to(types.get(name, buffer.dtype))
    for name, tensor in weights.items():
        kind = model.dtype
        if as_stored:
            kind = finer(kind, types.get(name, kind))
        state[name] = tensor.to(kind)
    with no_progress_bars():
        # it empties ``state``
        model.save_pretrained(folder, state_dict=state, max_shard_size=_SHARD)
    for file in folder.iterdir():
        if not is_of_weights(file.name):
            file.unlink()
    _name_as_in(base, folder, model, in_base, as_stored=as_stored)
    named: str | None = str(model.dtype).removeprefix("torch.")
    if as_stored and _are_in(in_base, folder):
        named = None
    copy_others(Path(base), folder, named)


def _are_in(in_base: Mapping[str, StoredTensor], folder: Path) -> bool:
    """Return whether all tensors in ``folder`` have the types that they have ``in_base``."""
    written = stored_tensors(str(folder))
    return all(name in in_base and in_base[name].dtype == written[name].dtype for name in written)


def stored_type(tensor: StoredTensor, dtype: torch.dtype, *, as_stored: bool) -> torch.dtype:
    """Return the type in which an export writes a tensor of its base: ``dtype``, or with
    ``as_stored`` the base's where that is finer.
    """
    if not as_stored:
        return dtype
    return finer(dtype, STORED_TYPES.get(tensor.dtype, dtype))


def _name_as_in(
    base: str,
    folder: Path,
    model: PreTrainedModel,
    in_base: Mapping[str, StoredTensor],
    *,
    as_stored: bool,
) -> None:
    """Give the weights in ``folder`` the names that they have ``in_base``, and add those of
    ``base`` that the model has not, where the two differ: the text of an image-text model is
    another model to transformers.

    A base whose weights are quantized has scales beside them, which no longer apply: nothing of it
    is added.
    """
    written = open_tensors(str(folder))
    if not in_base or written.keys() == set(in_base):
        return
    parameters = (
        (name, read_stored(stored)) for name, stored in stored_parameters(model, written).items()
    )
    state: dict[str, Tensor] = {}
    for name, tensor in FileNames(model, in_base).of(parameters):
        state[name] = tensor.clone()  # an expert is a part of another tensor's memory
    others = _others(base, model, in_base)
    if others:
        there = open_tensors(base)
        for name in others:
            tensor = there[name].get_tensor(name)
            kind = stored_type(in_base[name], model.dtype, as_stored=as_stored)
            state[name] = tensor.to(kind) if tensor.is_floating_point() else tensor
    if state.keys() == written.keys():
        return
    written.clear()  # closes the files
    for file in folder.iterdir():
        file.unlink()
    save_torch_state_dict(state, folder, max_shard_size=_SHARD)


def weights_of_others(base: str, in_base: Collection[str]) -> list[str]:
    """Return those of the names ``in_base``, of tensors of the model in ``base``, whose files may
    not have come, that the trained model has not, as of a tower: an export takes them from there.
    """
    if not in_base:
        return []
    with refused_by_name(base, _subject(base)):
        return _others(base, model_without_weights(base, torch.float32), in_base)


def _others(base: str, model: PreTrainedModel, in_base: Collection[str]) -> list[str]:
    if read_packing(base) is not None:
        return []
    return unknown_names(model, in_base)


def copy_others(base: Path, folder: Path, dtype: str | None) -> None:
    """Copy the files of ``base`` that hold no weights, and its further chat templates;
    ``config.json`` says that the numbers are ``dtype``, or with None what the base's says.
    """
    for file in base.iterdir():
        hidden = file.name.startswith(".")
        if file.is_file() and not (
            hidden or file.name in _NOT_OF_A_MODEL or is_of_weights(file.name)
        ):
            copyfile(file, folder / file.name)
    templates = base / CHAT_TEMPLATE_DIR
    if templates.is_dir():
        copytree(templates, folder / CHAT_TEMPLATE_DIR)
    config = json.loads((base / _CONFIG).read_text(encoding="utf-8"))
    if dtype is not None and not _set_dtype(config, dtype):
        config["torch_dtype"] = dtype
    for part in (config, config.get("text_config")):
        for key in PACKING_KEYS:  # of weights that were unpacked to be trained
            if isinstance(part, dict):
                part.pop(key, None)
    (folder / _CONFIG).write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Change the type where ``config``, or the config of a part, has one; return whether
    ``config`` itself has.
    """
    there = [key for key in ("dtype", "torch_dtype") if key in config]
    for key in there:
        config[key] = dtype
    for part in config.values():
        if isinstance(part, dict):
            _set_dtype(part, dtype)
    return bool(there)


def weight_buffers(base: str) -> list[str]:
    """Return the names of those buffers of the model in ``base`` that are saved with its weights,
    as experts' biases.

    They do not learn, and no checkpoint has them. ConfigError for a folder that cannot be loaded.
    """
    with refused_by_name(base, _subject(base)):
        return sorted(_buffers(model_without_weights(base, torch.float32)))


def _buffers_of(base: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers of the model in ``base`` that are saved with its weights; ``model`` is an
    empty one of its class.
    """
    names = _buffers(model)
    if not names:
        return {}
    subject = _subject(base)
    loaded = load_pretrained(model_class(base, subject), base, torch.float32, subject)
    return {name: loaded.get_buffer(name) for name in names}


def _buffers(model: PreTrainedModel) -> set[str]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return model.state_dict().keys() - parameters


def write_adapters(
    folder: Path,
    adapters: Mapping[str, Tensor],
    trainer: TrainerConfig,
    base: str,
    dtype: Dtype,
) -> None:
    """Write ``adapters``, which ``trainer`` made for the model in ``base``, to ``folder`` in peft's
    format.

    ConfigError when ``adapters`` has other parameters as well.
    """
    others = sorted(name for name in adapters if not is_adapter(name))
    if others:
        raise ConfigError(
            f"{_subject(base)}: beside adapters the checkpoint has {others}: leave out --adapter"
        )
    layers = {name.rsplit(".", 2)[0] for name in adapters}  # ...q_proj.lora_A.weight
    several = (read_config(base) or {}).get(
        "model_type"
    ) in FAMILIES  # a name may be of decoder and tower alike
    targets = sorted(layers if several else {layer.rpartition(".")[2] for layer in layers})
    config = peft_config(trainer.lora.rank, trainer.lora.alpha, targets, base)
    if base.startswith(HUB):
        name = hub_name(base)
        if not name.folder:  # peft has no name for a folder in a repository
            config.base_model_name_or_path = name.repo
            config.revision = name.revision
    config.inference_mode = True
    config.save_pretrained(folder)
    named = {
        PREFIX + name: tensor.to(torch_dtype(dtype, _CPU)) for name, tensor in adapters.items()
    }
    save_file(named, folder / WEIGHTS, {"format": "pt"})


def with_base(
    adapters: Mapping[str, Tensor], trainer: TrainerConfig, base: str
) -> dict[str, Tensor]:
    """Merge ``adapters`` with the weights of the folder ``base``, in float32. ConfigError when
    they do not fit.
    """
    subject = _subject(base)
    model = load_pretrained(model_class(base, subject), base, torch.float32, subject)
    named = {**dict(model.named_parameters()), **adapters}
    try:
        return dict(merged(named, trainer.lora.alpha / trainer.lora.rank, torch.device("cpu")))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{subject}: the checkpoint's adapters do not fit it; is that folder another model by "
            f"now? {error}"
        ) from error


def with_frozen(
    weights: Mapping[str, Tensor], parts: Sequence[VisionPart], base: str
) -> dict[str, Tensor]:
    """Return ``weights`` and, where they lack any of ``parts``, which did not learn, those of
    the folder ``base``.
    """
    subject = _subject(base)
    model = load_pretrained(model_class(base, subject), base, torch.float32, subject)
    family = FAMILIES.get(model.config.model_type)
    frozen = {
        name: each.detach() for name, each in model.named_parameters() if stays(name, parts, family)
    }
    return {**frozen, **weights}


def _subject(base: str) -> str:
    return f"model.path={base!r}, which the checkpoint was trained from"


def model_without_weights(base: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on the meta device, without weights."""
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model: PreTrainedModel = class_of_config(config).from_config(config, dtype=dtype)
    # the base's own is copied, also where transformers would refuse it
    model.generation_config = GenerationConfig()
    return model


def _check(weights: Mapping[str, Tensor], model: PreTrainedModel, subject: str) -> None:
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    lacking = sorted(expected.keys() - weights.keys())
    if lacking:
        raise ConfigError(
            f"{subject}: the checkpoint lacks {lacking[:5]}; is that folder another model by now?"
        )
    unknown = sorted(weights.keys() - expected.keys())
    if unknown:
        raise ConfigError(f"{subject}: the checkpoint has {unknown[:5]}, which that model has not")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ConfigError(
                f"{subject}: {name} has shape {list(weights[name].shape)} in the checkpoint and "
                f"{list(shape)} there"
            )
