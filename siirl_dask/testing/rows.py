"""Rows of random tokens, as trainers and critics take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from siirl_dask.testing.tiny import VOCABULARY
from siirl_dask.training import PackedRows

Lengths = Sequence[tuple[int, int]]
LENGTHS: Lengths = ((3, 4), (1, 6), (3, 4), (9, 1), (5, 0), (2, 11), (1, 6))
"""(prompt, response) of each row: equal and unequal lengths, and a row without a response."""


def random_rows(lengths: Lengths, only: range | None = None) -> PackedRows:
    """Random tokens, the same for a row whichever others are asked for."""
    tokens = []
    for row, (prompt, response) in enumerate(lengths):
        generator = torch.Generator().manual_seed(row)
        if only is None or row in only:
            tokens.append(torch.randint(0, VOCABULARY, (prompt + response,), generator=generator))
    prompts = [prompt for row, (prompt, _) in enumerate(lengths) if only is None or row in only]
    offsets = torch.tensor([0, *(len(row) for row in tokens)]).cumsum(0)
    return PackedRows(torch.cat([torch.zeros(0, dtype=torch.int64), *tokens]), offsets, torch.tensor(prompts).long())


def response_tokens(rows: PackedRows) -> int:
    return len(rows.tokens) - int(rows.prompt_lengths.sum())


def split_rows(rows: PackedRows) -> list[tuple[Tensor, int]]:
    """Each row's tokens and the length of its prompt."""
    lengths = rows.offsets.diff().tolist()
    return list(zip(rows.tokens.split(lengths), rows.prompt_lengths.tolist(), strict=True))


def signs(rows: PackedRows) -> Tensor:
    """[K]: +-1 for each response token, which follows from the token and so from no rank."""
    responses = [row[prompt:] for row, prompt in split_rows(rows)]
    return torch.cat([torch.zeros(0), *(1.0 - 2.0 * (response % 2) for response in responses)])


def assert_same_tensors(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(given) == list(expected)
    for name, tensor in given.items():
        assert torch.equal(tensor, expected[name]), f"{name} differs"
