"""Experts of a mixture: a tensor for each expert in a folder's files, one parameter for all of them
in the modules.

transformers 5 keeps gate and up projections of all experts as ``experts.gate_up_proj`` [experts, 2
x width, hidden] and the down projections as ``experts.down_proj`` [experts, hidden, width]; files
have ``experts.7.gate_proj.weight`` and so on, as engines read them. The names are those of Qwen's
mixtures, and of the families that took them over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siirl_dask.errors import ConfigError

_OF_ONE = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$"
)
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def joined(opened: Mapping[str, Any]) -> dict[str, Any]:
    """Return open files by parameter, given open files by tensor: those of experts as the parameter
    that joins them.

    Experts without gates stay as they are. ConfigError where an expert's tensor is missing.
    """
    found: dict[str, dict[tuple[int, str], str]] = {}
    rest = dict(opened)
    for name in opened:
        match = _OF_ONE.match(name)
        if match:
            found.setdefault(match["experts"], {})[int(match["expert"]), match["part"]] = name
            del rest[name]
    for experts, names in found.items():
        # experts without gates are no parameters of these names
        if not any(part == "gate_proj" for _, part in names):
            rest |= {name: opened[name] for name in names.values()}
            continue
        for parameter, parts in _PARTS.items():
            # LongCat-Flash has gates of experts that compute nothing, and no more of these
            count = 1 + max((expert for expert, part in names if part in parts), default=0)
            needed = [(expert, part) for expert in range(count) for part in parts]
            lacking = [each for each in needed if each not in names]
            if lacking:
                raise ConfigError(
                    f"{experts} of {count} experts: the files lack (expert, part) {lacking[:3]}"
                )
            sources = []
            for expert in range(count):
                own = [names[expert, part] for part in parts]
                sources.append(tuple((opened[name], name) for name in own))
            rest[f"{experts}.{parameter}"] = _Joined(tuple(sources))
    return rest


def apart_where(unfit: Callable[[str], bool], opened: Mapping[str, Any]) -> dict[str, Any]:
    """Return open files by parameter, as ``joined`` does, but by tensor where a joined parameter's
    name is ``unfit``.

    Those of ERNIE-4.5-VL are of two mixtures, of text and of images, which are parameters apart.
    """
    found: dict[str, Any] = {}
    for name, file in opened.items():
        if isinstance(file, _Joined) and unfit(name):
            found |= {own: part for parts in file.sources for part, own in parts}
        else:
            found[name] = file
    return found


@dataclass(frozen=True, slots=True)
class _Joined:
    """Stands for the open file of a parameter that joins the experts' tensors, and for its
    slice; reads on use.
    """

    sources: tuple[tuple[tuple[Any, str], ...], ...]
    """Open file and name of each part, by expert."""

    def get_slice(self, name: str) -> _Joined:
        return self

    def get_tensor(self, name: str) -> Tensor:
        return self[tuple(slice(0, size) for size in self.get_shape())]

    def get_shape(self) -> list[int]:
        parts = [file.get_slice(name).get_shape() for file, name in self.sources[0]]
        return [len(self.sources), sum(rows for rows, _ in parts), parts[0][1]]

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        experts, rows, columns = places
        chosen = []
        for parts in self.sources[experts]:
            whole = torch.cat([file.get_tensor(name) for file, name in parts])
            chosen.append(whole[rows, columns])
        return torch.stack(chosen)
