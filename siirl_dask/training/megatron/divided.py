"""Divides a stage's parameters among the ranks that hold them: each steps its own, and gives them
to the others.

This is stage 1 of ZeRO (arXiv:1910.02054): the optimizer's state is held once, not once for each
replica. Parameters stay whole, so that a checkpoint has each under its own name, whoever stepped
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from siirl_dask.errors import ConfigError
from siirl_dask.training.megatron.grid import RankGrid
from siirl_dask.training.megatron.weights import StageWeights

_BUCKET = 64 * 2**20  # bytes of a message


class DividedParameters:
    """The parameters of a stage, each of which one of the ranks that hold it steps."""

    def __init__(self, weights: StageWeights, grid: RankGrid) -> None:
        """ConfigError, by its key, where more ranks than there are parameters hold them."""
        names = list(weights.parameters)
        shared = names[: len(names) - weights.experts]
        experts = names[len(names) - weights.experts :]
        if len(shared) < grid.holders:
            raise ConfigError(
                f"trainer.megatron.distributed_optimizer=true: a stage has {len(shared)} "
                f"parameters for its {grid.holders} copies, expected at least as many; leave it "
                "out, or give a stage more layers"
            )
        self._sizes = {name: each.numel() for name, each in weights.parameters.items()}
        groups = ((shared, grid.held_by), (experts, grid.edp))
        self._divided = [self._divide(names, group) for names, group in groups if names]

    @property
    def own(self) -> set[str]:
        """Names of the parameters that this rank steps."""
        return {name for group, parts in self._divided for name in parts[_place_in(group)]}

    @torch.no_grad()
    def spread(self, held: Mapping[str, Tensor]) -> None:
        """Give tensors of all parameters, of which this rank's own are right, the values that their
        owners have.

        All ranks that hold a part of the stage must call.
        """
        for group, parts in self._divided:
            if group is None:
                continue
            for owner, names in enumerate(parts):
                if names:
                    tensors = [held[name].detach() for name in names]
                    dist._broadcast_coalesced(group, tensors, _BUCKET, owner)  # type: ignore[attr-defined]

    def _divide(self, names: Sequence[str], group: Any) -> tuple[Any, list[list[str]]]:
        return group, divide(
            {name: self._sizes[name] for name in names}, 1 if group is None else group.size()
        )


def divide(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Return names for each of so many parts: the largest first, each to the part that has least so
    far.

    No part has more than an even share and the largest of them together, and none is empty where
    there are enough.
    """
    shares: list[list[str]] = [[] for _ in range(parts)]
    held = [(0, 0)] * parts
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        at = min(range(parts), key=held.__getitem__)
        shares[at].append(name)
        held[at] = held[at][0] + sizes[name], held[at][1] + 1
    return shares


def _place_in(group: Any) -> int:
    if group is None:
        return 0
    return dist.get_rank(group)
