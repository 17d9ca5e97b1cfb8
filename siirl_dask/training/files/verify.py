"""``siirl-dask export --verify``: compares an exported folder with what was trained.

What is expected comes from the checkpoint, and from the base's own files for what does not learn:
buffers that are saved with weights, frozen parts, and weights under adapters. Nothing of it comes
from what the export has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from siirl_dask.config import Dtype
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import WEIGHT, A, B, is_adapter
from siirl_dask.models.architecture import read_config
from siirl_dask.models.loading import load_pretrained, model_class
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.shapes import StoredTensor, stored_tensors
from siirl_dask.models.weight_files import open_tensors, open_weights
from siirl_dask.models.weight_names import (
    STORED_TYPES,
    finer,
    parameter_names,
    parameter_types,
    read_stored,
    stored_parameters,
    unknown_names,
)
from siirl_dask.training.files.hugging_face import model_without_weights, stored_type

_ROUNDING = 1e-5  # log-probs of one model that is loaded in two ways
# a share of the largest number of a weight that adapters were added to, in another order
_ROUNDING_OF_SUMS = 1e-6
_CPU = torch.device("cpu")
_QUANTIZED = "quantization_config"


def check_export(
    folder: Path,
    trained: Mapping[str, Tensor],
    base: str,
    dtype: Dtype,
    *,
    alpha: float = 0.0,
    in_base: Mapping[str, StoredTensor] | None = None,
    as_stored: bool = False,
) -> None:
    """Raise ConfigError, by name, unless ``folder`` has the model that was trained, in numbers of
    ``dtype``, and with ``as_stored`` of the type in ``base`` where that is finer.

    ``trained`` has the checkpoint's tensors by name, of all that learns: weights (tied ones once),
    or adapters, which change a weight by ``alpha / rank * B A``. All others are those of the folder
    ``base``, whose tensors are ``in_base``; None: its files of weights are there. Tensors are
    compared one by one, exactly but for adapters, whose sums are rounded. The rest of the folder is
    compared by log-probs of random tokens, with the settings in its ``config.json`` and with those
    of ``base``.
    """
    subject = f"model.path={base!r}, which the checkpoint was trained from"
    kind = model_class(base, subject)
    if in_base is None:
        in_base = stored_tensors(base)
    stored = stored_tensors(str(folder))
    numbers = torch_dtype(dtype, _CPU)
    model = model_without_weights(base, numbers)
    _check_types(model, stored, in_base, numbers, as_stored=as_stored)
    types = parameter_types(model, stored)
    numbers = reduce(finer, (types.get(name, numbers) for name, _ in model.named_parameters()))
    written = load_pretrained(kind, str(folder), numbers, f"the folder {folder}")
    _check_tensors(written, trained, _Base(base, kind, written, subject), alpha, types)
    _check_others(folder, base, written)
    settings = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    if hasattr(settings, _QUANTIZED):
        delattr(settings, _QUANTIZED)  # of the base's weights, and not of those that were written
    expected = load_pretrained(kind, str(folder), numbers, f"the folder {folder}", config=settings)
    _check_log_probs(written, expected, base)


class _Base:
    """Tensors of the base, as its files have them."""

    def __init__(self, base: str, kind: Any, model: PreTrainedModel, subject: str) -> None:
        """``model`` is one of the same class, whose names the tensors have."""
        self._base = base
        self._kind = kind
        self._subject = subject
        files = {}
        if not _is_quantized(base):
            files = open_weights(base)
        self._stored = stored_parameters(model, files)
        self._loaded: dict[str, Tensor] = {}

    def find(self, names: list[str]) -> Tensor:
        """Return the tensor that has one of ``names``. ConfigError if none has."""
        for name in names:
            if name in self._stored:
                return read_stored(self._stored[name])
        # without safetensors, or with weights that are to be unpacked
        if not self._stored and not self._loaded:
            model = load_pretrained(self._kind, self._base, torch.float32, self._subject)
            self._loaded = dict(model.state_dict())
        for name in names:
            if name in self._loaded:
                return self._loaded[name]
        raise _another_model(
            f"it has {names[0]}, which neither the checkpoint nor {self._base!r} has"
        )


def _check_types(
    model: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    in_base: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    *,
    as_stored: bool,
) -> None:
    """Check the type of each tensor that is ``stored`` in the folder against that in the base's
    files, or ``dtype``. The model may be without memory.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = model.state_dict().keys() - parameters
    known = parameter_names(model, stored)
    for name, tensor in stored.items():
        before = in_base.get(name)
        if before is None or before.dtype not in STORED_TYPES:
            continue
        expected = stored_type(before, dtype, as_stored=as_stored)
        if known.get(name) in buffers:
            expected = STORED_TYPES[before.dtype]
        if STORED_TYPES.get(tensor.dtype) is not expected:
            raise _another_model(
                f"{name} is {tensor.dtype}, where {expected} was expected: it is {before.dtype} in "
                "the base"
            )


def _check_tensors(
    written: PreTrainedModel,
    trained: Mapping[str, Tensor],
    base: _Base,
    alpha: float,
    types: Mapping[str, torch.dtype],
) -> None:
    """Check the numbers of each tensor; ``types`` are those of the files, by parameter."""
    parameters = {name for name, _ in written.named_parameters(remove_duplicate=False)}
    found = written.state_dict()
    weights = {name for name in trained if not is_adapter(name)}
    adapted = {name.removesuffix(A) + WEIGHT for name in trained if name.endswith(A)}
    lacking = sorted((weights | adapted) - found.keys())
    if lacking:
        raise _another_model(f"it lacks {lacking[:5]} of the checkpoint")
    for names in _tied(found):
        name = names[0]
        learned = sorted(weights.intersection(names))
        changed = sorted(adapted.intersection(names))
        expected = trained[learned[0]] if learned else base.find(names)
        origin = "the checkpoint's"
        allowed = torch.zeros(())
        if changed:
            expected = _with_adapter(expected, trained, changed[0].removesuffix(WEIGHT), alpha)
            next_number = torch.finfo(types[name]).eps * expected.abs()
            allowed = next_number + _ROUNDING_OF_SUMS * expected.abs().max()
        elif not learned:
            origin = "the base's, which does not learn"
        if name in parameters:
            expected = expected.to(types[name])  # buffers are written as the base has them
        off = _off(name, found[name], expected)
        if not bool((off <= allowed).all()):
            raise _another_model(f"{name} differs by {float(off.max()):.3g} from {origin}")


def _tied(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of each tensor, of which tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            names.setdefault(tensor.data_ptr(), []).append(name)
    yield from names.values()


def _with_adapter(
    weight: Tensor,
    trained: Mapping[str, Tensor],
    layer: str,
    alpha: float,
) -> Tensor:
    """[out, in] -> [out, in] in float32."""
    a = trained[layer + A].float()
    b = trained[layer + B].float()
    return weight.float() + (b @ a) * (alpha / a.shape[0])


def _off(name: str, found: Tensor, expected: Tensor) -> Tensor:
    """Return by how much each number of a tensor is off. ConfigError where shapes differ."""
    if found.shape != expected.shape:
        raise _another_model(
            f"{name} has shape {list(found.shape)}; expected {list(expected.shape)}"
        )
    return (found.float() - expected.to(found.dtype).float()).abs()


def _check_others(folder: Path, base: str, model: PreTrainedModel) -> None:
    """Check what the base's files have and the model has not, such as the tower beside a text
    that was trained.
    """
    if _is_quantized(base):
        return  # its scales no longer apply, and nothing of it comes along
    there = open_tensors(base)
    written = open_tensors(str(folder))
    for name in unknown_names(model, there):
        if name not in written:
            raise _another_model(
                f"it lacks {name}, which {base!r} has beside the model that was trained"
            )
        tensor = written[name].get_tensor(name)
        if bool(_off(name, tensor, there[name].get_tensor(name)).any()):
            raise _another_model(f"{name} is not that of {base!r}")


def _check_log_probs(written: PreTrainedModel, expected: PreTrainedModel, base: str) -> None:
    words = _words(expected.config)
    drawn = torch.randint(0, len(words), (2, 64), generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor(words)[drawn]
    with torch.no_grad():
        first, second = (
            model.eval()(tokens).logits.float().log_softmax(-1) for model in (expected, written)
        )
    differ_by = float((first - second).abs().max())
    if not differ_by <= _ROUNDING:  # not a number is no smaller
        raise _another_model(
            f"its log-probs differ by {differ_by:.3g} from those of its weights with the "
            f"config.json of {base!r}"
        )


def _words(config: PretrainedConfig) -> list[int]:
    """Return the tokens of a model but those that its config names, such as an image's, which
    would want an image.
    """
    text = config.get_text_config()
    named = {**text.to_dict(), **config.to_dict()}
    special = {
        value for key, value in named.items() if key.endswith("token_id") and isinstance(value, int)
    }
    return [token for token in range(text.vocab_size) if token not in special]


def _is_quantized(base: str) -> bool:
    return _QUANTIZED in (read_config(base) or {})


def _another_model(reason: str) -> ConfigError:
    return ConfigError(f"what was written is another model: {reason}; nothing is at DEST")
