"""A trainer's or a critic's state, written by torch.distributed.checkpoint and read into another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from siirl_dask.context import Rank
from siirl_dask.training import Critic, Trainer


class Stateful(Protocol):
    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def save_state(old: Stateful, folder: Path, rank: Rank | None = None) -> None:
    """Every rank calls it, as it calls what follows."""
    group = rank.group if rank else None
    save(old.state(), checkpoint_id=folder, process_group=group, no_dist=group is None)


def load_state(new: Stateful, folder: Path, rank: Rank | None = None) -> None:
    state = new.state()
    group = rank.group if rank else None
    load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    new.load_state(state)


def copied_weights(trained: Trainer | Critic) -> dict[str, Tensor]:
    """As they are now."""
    return {name: tensor.clone() for name, tensor in trained.weights()}


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Its tensors by their path, ``model/lm_head.weight``."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
