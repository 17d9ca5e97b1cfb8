"""Tries an advantage of rows before a run begins: the shape of its result, and whether it learns from
a sample that is alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from siirl_dask.algorithms import Outcomes


def check_row_advantage(
    *, advantage: Callable[[Outcomes], Tensor], parts: tuple[str, ...] = ()
) -> None:
    """Call the advantage with no rows, before the run begins. ValueError for a result of the
    wrong shape.
    """
    empty = torch.zeros(0)
    empty_ids = torch.zeros(0, dtype=torch.int64)
    outcomes = Outcomes(
        rewards=empty,
        group_ids=empty_ids,
        lengths=empty_ids,
        baselines=empty,
        parts=dict.fromkeys(parts, empty),
    )
    check_empty(advantage(outcomes), "advantages")


def check_empty(tensor: Tensor, name: str) -> None:
    """Raise ValueError for a result for no rows that is not empty."""
    if tensor.shape != (0,):
        raise ValueError(f"{name} have shape {list(tensor.shape)}: expected [0]")


def learns_alone(*, advantage: Callable[[Outcomes], Tensor], parts: tuple[str, ...] = ()) -> bool:
    """Return whether a single sample of a prompt can get an advantage other than 0.

    False for an advantage that compares the samples of a prompt: a sample of reward 0 that is alone
    in its group gets 0, and in a group with another sample it does not.
    """
    prompts = torch.arange(2)
    apart = advantage(_two_samples(prompts, parts))
    together = advantage(_two_samples(torch.zeros_like(prompts), parts))
    if torch.equal(apart, together):
        return True
    return bool(apart[0] != 0)


def _two_samples(group_ids: Tensor, parts: tuple[str, ...]) -> Outcomes:
    rewards = torch.tensor([0.0, 1.0])
    return Outcomes(
        rewards=rewards,
        parts=dict.fromkeys(parts, rewards),
        group_ids=group_ids,
        lengths=torch.ones(2, dtype=torch.int64),
        baselines=torch.full((2,), 0.5),
    )
