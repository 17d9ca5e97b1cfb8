"""Rows of random tokens for trainers and critics, nodes for tests of the data plane, and helpers
for states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from siirl_dask.context import Context, Device, Rank, Reduce
from siirl_dask.planner import columns
from siirl_dask.schema import RESPONSE_IDS, TOKENS, TYPES, fields
from siirl_dask.tasks.vocabulary import VOCABULARY
from siirl_dask.training import Critic, PackedRows, TrainBatch, Trainer

Lengths = Sequence[tuple[int, int]]
LENGTHS: Lengths = ((3, 4), (1, 6), (3, 4), (9, 1), (5, 0), (2, 11), (1, 6))
"""Tokens of (prompt, response) in each row: equal and unequal lengths, and a row without a
response."""


def random_rows(lengths: Lengths, only: range | None = None) -> PackedRows:
    """Return rows of random tokens, those in ``only`` or all; a row's tokens depend on its
    number alone.
    """
    tokens = []
    for row, (prompt, response) in enumerate(lengths):
        generator = torch.Generator().manual_seed(row)
        if only is None or row in only:
            tokens.append(torch.randint(0, VOCABULARY, (prompt + response,), generator=generator))
    prompts = [prompt for row, (prompt, _) in enumerate(lengths) if only is None or row in only]
    offsets = torch.tensor([0, *(len(row) for row in tokens)]).cumsum(0)
    return PackedRows(
        torch.cat([torch.zeros(0, dtype=torch.int64), *tokens]),
        offsets,
        torch.tensor(prompts).long(),
    )


def grouped_rows(groups: Sequence[tuple[int, Sequence[int]]]) -> PackedRows:
    """Return rows of random tokens, of which those of a group have one prompt: (its tokens,
    those of each response).
    """
    numbers = torch.Generator().manual_seed(0)
    tokens = []
    prompts = []
    for prompt, responses in groups:
        common = torch.randint(0, VOCABULARY, (prompt,), generator=numbers)
        for response in responses:
            tokens.append(
                torch.cat([common, torch.randint(0, VOCABULARY, (response,), generator=numbers)])
            )
            prompts.append(prompt)
    offsets = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    return PackedRows(torch.cat(tokens), offsets, torch.tensor(prompts))


def response_tokens(rows: PackedRows) -> int:
    """Return the number of response tokens."""
    return len(rows.tokens) - int(rows.prompt_lengths.sum())


def split_rows(rows: PackedRows) -> list[tuple[Tensor, int]]:
    """Return each row's tokens and the length of its prompt."""
    lengths = rows.offsets.diff().tolist()
    return list(zip(rows.tokens.split(lengths), rows.prompt_lengths.tolist(), strict=True))


def signs(rows: PackedRows) -> Tensor:
    """Return 1 or -1 for each response token, decided by the token alone: the same on any rank.
    [K].
    """
    responses = [row[prompt:] for row, prompt in split_rows(rows)]
    return torch.cat([torch.zeros(0), *(1.0 - 2.0 * (response % 2) for response in responses)])


def assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless names, order and bits are equal."""
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), f"{name} differs"


def build_nothing(device: Device, rank: Rank) -> None:
    """Build a role that needs no model."""


@columns(writes=fields(RESPONSE_IDS), new_rows=True)
def fill(ctx: Context, table: pa.Table, *, tokens: int) -> pa.Table:
    """Give each row a response of ``tokens`` tokens that count up from its row id and step."""
    first = table["row_id"].to_numpy() + 1000 * ctx.step
    values = (first[:, None] + np.arange(tokens)).astype(np.int32).reshape(-1)
    offsets = pa.array(np.arange(table.num_rows + 1, dtype=np.int64) * tokens)
    table = table.set_column(
        table.column_names.index(TOKENS),
        TOKENS,
        pa.array(np.full(table.num_rows, tokens), pa.int64()),
    )
    return table.append_column(
        RESPONSE_IDS, pa.LargeListArray.from_arrays(offsets, values, type=TYPES[RESPONSE_IDS])
    )


@columns(reads=[RESPONSE_IDS])
def take(ctx: Context, table: pa.Table) -> pa.Table:
    """Log the number of responses and the sum of their tokens, so that a test can check what
    arrived.
    """
    ctx.log("samples", table.num_rows, Reduce.SUM)
    ctx.log(
        "taken/sum",
        float(table[RESPONSE_IDS].combine_chunks().flatten().to_numpy().sum()),
        Reduce.SUM,
    )
    return table


class Stateful(Protocol):
    """A trainer or a critic: it has a state that is saved and loaded."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def save_state(old: Stateful, folder: Path, rank: Rank | None = None) -> None:
    """Write a state as a checkpoint; every rank must call it."""
    group = rank.group if rank else None
    save(old.state(), checkpoint_id=folder, process_group=group, no_dist=group is None)


def load_state(new: Stateful, folder: Path, rank: Rank | None = None) -> None:
    """Load a checkpoint that ``save_state`` wrote; every rank must call it."""
    state = new.state()
    group = rank.group if rank else None
    load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    new.load_state(state)


def copied_weights(trained: Trainer | Critic) -> dict[str, Tensor]:
    """Return copies of the weights, on the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in trained.weights()}


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested state by their path, such as ``model/lm_head.weight``."""
    values: dict[str, Any] = {}
    for name, value in state.items():
        values |= (
            flat(value, f"{prefix}{name}/")
            if isinstance(value, Mapping)
            else {f"{prefix}{name}": value}
        )
    return values


def batch_of(
    trainer: Trainer,
    rows: PackedRows,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
) -> TrainBatch:
    """Make a batch whose old log-probs are the policy's current ones."""
    logprobs = trainer.logprobs(rows).logprobs
    advantages = signs(rows) if advantages is None else advantages
    return TrainBatch(
        rows=rows,
        mask=mask,
        old_logprobs=logprobs,
        advantages=advantages,
        rollout_logprobs=logprobs,
    )
