"""Reads folders with adapters in peft's format, with which a policy begins (``trainer.lora.path``).

A folder may come from anybody: nothing in it is unpickled, its config is read up to 1 MiB, and its
tensors are read when their names and shapes are those that the policy has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siirl_storage import StorageError, join, open_fs

from siirl_dask.config import LoraConfig
from siirl_dask.errors import ConfigError, SiirlError
from siirl_dask.models.architecture import read_config
from siirl_dask.models.cache import ADAPTER_CONFIG
from siirl_dask.models.remote import HUB
from siirl_dask.models.shapes import tensors_in_file

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of every name in peft's file."""
_PICKLED = "adapter_model.bin"
_OF_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LARGEST_CONFIG = 2**20  # bytes
_LARGEST_NUMBER = 8  # bytes of a number in the file, at most
_HEADER = 2**24  # bytes for the header of a file, and its metadata
_UNKNOWN_OPTIONS = (
    "use_dora",
    "use_rslora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "megatron_config",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "layer_replication",
)
"""Options of peft that change what the adapters compute, or add others."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin for which peft changes the weights of the base as well."""
_NOT_OF_A_MODEL = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
Shapes = Mapping[str, tuple[int, ...]]


def check_adapter_folder(lora: LoraConfig, base: str, expected: Shapes | None) -> None:
    """Raise ConfigError unless ``lora.path`` holds adapters of ``lora.rank`` and ``lora.alpha`` for
    the model ``base``.

    ``expected`` has the shapes of the policy's adapters, by name; None where they are not known
    yet.
    """
    assert lora.path is not None
    subject = _subject(lora)
    config = _read_config(lora)
    if config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{subject}: its adapters are {config['peft_type']}; expected LORA")
    for key, name, wanted in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if config.get(key) != wanted:
            raise ConfigError(
                f"{subject}: its adapters have {key}={config.get(key)!r}, and trainer.lora.{name} "
                f"is {wanted}; give the same"
            )
    unknown = [f"{name}={config[name]!r}" for name in _UNKNOWN_OPTIONS if config.get(name)]
    if config.get("bias", "none") != "none":
        unknown.append(f"bias={config['bias']!r}")
    if str(config.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        unknown.append(f"init_lora_weights={config['init_lora_weights']!r}")
    if unknown:
        raise ConfigError(
            f"{subject}: {CONFIG} has {', '.join(unknown)}, which adapters here do not have"
        )
    check_same_base(config.get("base_model_name_or_path"), base, subject)
    if expected is not None:
        _check_shapes(_shapes(lora), expected, subject)


def check_same_base(named: object, base: str, subject: str) -> None:
    """Raise ConfigError where adapters were trained on a model of another config than ``base``.

    ``named`` is where that model was: nothing is said where it cannot be read. A name of the hub is
    looked up there where ``base`` is of the hub as well.
    """
    if base.startswith(HUB) and isinstance(named, str) and _OF_HUB.fullmatch(named):
        named = HUB + named
    if not isinstance(named, str) or named == base or not ("://" in named or Path(named).is_dir()):
        return
    try:
        trained_on = read_config(named)
        model = read_config(base)
    except SiirlError:
        return
    if trained_on is None or model is None:
        return
    keys = (trained_on.keys() | model.keys()) - _NOT_OF_A_MODEL
    differing = sorted(key for key in keys if trained_on.get(key) != model.get(key))
    if differing:
        raise ConfigError(
            f"{subject}: its adapters were trained on another model, {named!r}, which differs from "
            f"model.path={base!r} "
            f"in {', '.join(differing[:5])} of config.json; expected adapters of the same base"
        )


def read_adapters(lora: LoraConfig, expected: Shapes) -> dict[str, Tensor]:
    """Return the tensors of the folder ``lora.path`` by their names in the policy. ConfigError, by
    name, unless they are those that are ``expected``.
    """
    from safetensors.torch import load

    assert lora.path is not None
    subject = _subject(lora)
    _check_shapes(_shapes(lora), expected, subject)
    url = join(lora.path, WEIGHTS)
    try:
        fs, path = open_fs(url)
        most = _HEADER + _LARGEST_NUMBER * sum(map(prod, expected.values()))
        nbytes = int(fs.info(path)["size"])
        if nbytes > most:
            raise ConfigError(
                f"{subject}: {WEIGHTS} has {nbytes} bytes, and its adapters take {most} at most"
            )
        tensors = load(fs.cat_file(path))
    except ConfigError:
        raise
    except Exception as error:  # drivers of remote storage, and safetensors, raise what they like
        raise ConfigError(
            f"{subject}: {WEIGHTS} cannot be read: {type(error).__name__}: {error}"
        ) from error
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _subject(lora: LoraConfig) -> str:
    return f"trainer.lora.path={lora.path!r}"


def _read_config(lora: LoraConfig) -> dict[str, Any]:
    """Return the folder's config. ConfigError where there is none, or where its adapters are
    pickled.
    """
    subject = _subject(lora)
    try:
        fs, folder = open_fs(str(lora.path))
        names = {str(name).rstrip("/").rpartition("/")[2] for name in _listed(fs, folder)}
        if CONFIG in names and WEIGHTS not in names and _PICKLED in names:
            raise ConfigError(
                f"{subject}: its adapters are pickled ({_PICKLED}), which is not read; save "
                f"{WEIGHTS}"
            )
        missing = [name for name in (CONFIG, WEIGHTS) if name not in names]
        if missing:
            raise ConfigError(
                f"{subject}: there is no {missing[0]}; expected a folder as peft or `siirl-dask "
                "export --adapter` writes it, or RUN or RUN@STEP of a run with adapters"
            )
        with fs.open(f"{folder}/{CONFIG}", "rb") as file:
            text = file.read(_LARGEST_CONFIG + 1)
        if len(text) > _LARGEST_CONFIG:
            raise ConfigError(f"{subject}: {CONFIG} has more than {_LARGEST_CONFIG} bytes")
        config = json.loads(text)
    except ConfigError:
        raise
    except StorageError as error:
        raise ConfigError(f"{subject}: {error}") from error
    except Exception as error:
        # drivers of remote storage raise what they like, and so does what is no JSON
        raise ConfigError(
            f"{subject}: {CONFIG} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{subject}: {CONFIG} is no mapping")
    return config


def _listed(fs: Any, folder: str) -> Sequence[str]:
    try:
        return list(fs.ls(folder, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _shapes(lora: LoraConfig) -> Shapes:
    """Return the shapes of the folder's tensors. ConfigError for numbers that want scales."""
    subject = _subject(lora)
    found = tensors_in_file(join(str(lora.path), WEIGHTS), subject)
    for name, tensor in found.items():
        if tensor.type_fault:
            raise ConfigError(f"{subject}: {name} {tensor.type_fault}")
    return {name.removeprefix(PREFIX): tensor.shape for name, tensor in found.items()}


def _check_shapes(found: Shapes, expected: Shapes, subject: str) -> None:
    hint = "; are trainer.lora.targets those that the adapters were trained with?"
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ConfigError(
            f"{subject}: it lacks {len(missing)} of the policy's adapters, such as "
            f"{missing[0]}{hint}"
        )
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise ConfigError(
            f"{subject}: it has {len(extra)} tensors that the policy has not, such as "
            f"{extra[0]}{hint}"
        )
    for name, shape in expected.items():
        if found[name] != tuple(shape):
            raise ConfigError(
                f"{subject}: {name} has shape {list(found[name])}; expected {list(shape)}"
            )
