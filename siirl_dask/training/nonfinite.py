"""Finds what is not finite in a mini-batch that may take no optimizer step: which of its
numbers, in which rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import isfinite

import torch
from torch import Tensor

from siirl_dask.algorithms import TokenLoss
from siirl_dask.training.optimizer import FlatGradients
from siirl_dask.training.packing import response_offsets
from siirl_dask.training.trainer import Batch

GRADIENT = "gradient"
"""Name of the gradient among what is not finite."""


class Examination:
    """Looks into each micro-batch of a mini-batch, once its gradient has been added to
    ``gradients``.
    """

    def __init__(self, batch: Batch, gradients: FlatGradients, *, sharded: bool) -> None:
        self.rows: dict[str, list[int]] = {name: rows for name, rows in _bad_columns(batch) if rows}
        self.micro_batches: list[int] = []
        self._gradients = gradients
        self._sharded = sharded
        self._row = self._micro_batch = 0
        self._was_finite = True

    def see(self, result: TokenLoss, offsets: Tensor) -> None:
        """Look into the next micro-batch. Its tokens' losses are [S], their rows' offsets [R +
        1].
        """
        count = len(offsets) - 1
        bad = False
        for name, numbers in {"loss": result.loss, **result.metrics}.items():
            rows = _rows_of(numbers, offsets)
            if rows:
                self.rows.setdefault(name, []).extend(self._row + row for row in rows)
                bad = True
        if self._was_finite and not isfinite(float(self._gradients.squares())):
            self._was_finite = False
            if not bad and not self._sharded:
                self.rows[GRADIENT] = list(range(self._row, self._row + count))
            bad = True
        if bad:
            self.micro_batches.append(self._micro_batch)
        self._row += count
        self._micro_batch += 1


def _bad_columns(batch: Batch) -> Iterator[tuple[str, list[int]]]:
    """Yield each column of numbers with the rows in which it is not finite at a token that is
    learned from.
    """
    offsets = response_offsets(batch.rows)
    for field in fields(batch):
        value = getattr(batch, field.name)
        columns = value if isinstance(value, Mapping) else {field.name: value}
        for name, numbers in columns.items():
            if isinstance(numbers, Tensor) and numbers.is_floating_point():
                yield name, _rows_of(numbers, offsets, batch.mask)


def _rows_of(numbers: Tensor, offsets: Tensor, mask: Tensor | None = None) -> list[int]:
    """Return the rows that have a number which is not finite. [K], [R + 1], [K] bool."""
    bad = ~numbers.detach().isfinite()
    if mask is not None:
        bad &= mask
    places = bad.nonzero().flatten()
    rows: list[int] = (
        (torch.searchsorted(offsets.to(places.device), places, right=True) - 1).unique().tolist()
    )
    return rows
