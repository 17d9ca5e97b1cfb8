"""Which weights a model takes, known before any is loaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


class Parameters:
    """Names and shapes of a model's parameters. Those that share a tensor go by the first of their names."""

    def __init__(self, model: PreTrainedModel) -> None:
        first: dict[int, str] = {}
        self._names: dict[str, str] = {}
        self._shapes: dict[str, list[int]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names[name] = first.setdefault(id(parameter), name)
            self._shapes[self._names[name]] = list(parameter.shape)

    @classmethod
    def of_folder(cls, path: str) -> Parameters:
        """From the model's config: no weights are read, no memory is used."""
        with torch.device("meta"):
            return cls(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True)))

    def fit(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Tensor]:
        """All of them, each under its first name. ValueError naming what is missing, unknown or of another shape."""
        found: dict[str, Tensor] = {}
        unknown, misshaped = [], []
        for given, tensor in tensors:
            if (name := self._names.get(given)) is None:
                unknown.append(given)
            elif self._shapes[name] != list(tensor.shape):
                misshaped.append(f"{given} {list(tensor.shape)} for {self._shapes[name]}")
            found[name or given] = tensor
        missing = sorted(self._shapes.keys() - found.keys())
        wrong = {"missing": missing, "unknown": sorted(unknown), "misshaped": sorted(misshaped)}
        if any(wrong.values()):
            raise ValueError(f"weights of version {version} do not fit: { {k: v for k, v in wrong.items() if v} }")
        return found
