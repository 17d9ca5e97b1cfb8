"""Packed rows laid side by side with padding, for layers and models that cannot compute them one
after the other.

All models here are causal: what stands after the end of a row changes nothing in it, so padding
needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from siirl_dask.training.packing import Runs

MOST_PADDING = 1 / 4
"""Share of a group's places that may be padding."""


def row_groups(runs: Runs, most_padding: float = MOST_PADDING) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of neighbouring rows to lay side by side, which are packed shortest first,
    so that no more than a share of each group's places is padding.
    """
    group: list[int] = []
    tokens = 0
    for count, length in runs:
        for _ in range(count):
            places = length * (len(group) + 1)
            if group and tokens + length < (1 - most_padding) * places:
                yield tuple(group)
                group = []
                tokens = 0
            group.append(length)
            tokens += length
    if group:
        yield tuple(group)


def single_rows(runs: Runs) -> Iterator[tuple[int, ...]]:
    """Yield the length of each row, as a group of its own."""
    for count, length in runs:
        for _ in range(count):
            yield (length,)


def side_by_side(packed: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Lay packed rows side by side, zeros after the shorter ones. [T, ...] -> [n, L, ...]."""
    longest = max(lengths)
    if min(lengths) == longest:
        alike: Tensor = packed.unflatten(0, (len(lengths), longest))
        return alike
    rows = packed.new_zeros(len(lengths), longest, *packed.shape[1:])
    return rows.index_put((_has_token(lengths, packed.device),), packed)


def one_after_another(rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Pack rows again that ``side_by_side`` laid out. [n, L, ...] -> [T, ...]."""
    if min(lengths) == max(lengths):
        return rows.flatten(0, 1)
    return rows[_has_token(lengths, rows.device)]


def _has_token(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[n, L] bool."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
