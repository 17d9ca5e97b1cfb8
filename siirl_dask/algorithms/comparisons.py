"""Compares numbers with those that share a key: the statistics behind advantages of turns and of
agents.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from siirl_dask.algorithms.advantages import Outcomes, dr_grpo, grpo


def compare_within(
    values: Tensor,
    keys: Sequence[Hashable],
    *,
    divide_by_std: bool,
    epsilon: float,
    lone: bool = True,
) -> Tensor:
    """Subtract from each number the mean of those with an equal key, as ``dr_grpo`` does with
    groups. [N] -> [N].

    With ``divide_by_std`` the result is divided by ``std + epsilon``, as in ``grpo``. A number that
    is alone with its key keeps mean 0 and std 1; without ``lone`` it becomes 0, since there is
    nothing to compare it with.
    """
    numbers: dict[Hashable, int] = {}
    ids = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)
    outcomes = Outcomes(rewards=values, group_ids=ids, lengths=torch.ones_like(ids))
    compared = grpo(outcomes, epsilon=epsilon) if divide_by_std else dr_grpo(outcomes)
    if lone:
        return compared
    alone = (ids.bincount() == 1)[ids] & compared.isfinite()
    return compared.masked_fill(alone, 0.0)
