"""The rows of the ranks that share tokens, cut into micro-batches together, and of each micro-batch a rank's tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from siirl_dask.collectives import all_gather
from siirl_dask.context import Rank
from siirl_dask.training.packing import MicroBatch, idle_batch, micro_batches
from siirl_dask.training.parallel.ulysses import Route
from siirl_dask.training.trainer import PackedRows


def shared_batches(rows: PackedRows, ranks: Rank, budget: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of the rows of all ``ranks``, the same number on each of them, all of which must call.

    ``budget`` tokens are a rank's, so together they take n times as many. ``offsets`` and ``tokens`` of a micro-batch
    are of those of its rows that are this rank's own.
    """
    union, owners = gather_rows(rows, ranks, device)
    batches, first, done = [], 0, 0
    for whole in micro_batches(union, budget * ranks.size):
        part, owner = own_rows(whole, owners[first:], ranks, done)
        batches.append(shard_tokens(part, owner, ranks))
        first, done = first + len(whole.offsets) - 1, part.tokens.stop
    return batches


def own_rows(whole: MicroBatch, owners: Tensor, ranks: Rank, done: int) -> tuple[MicroBatch, Tensor]:
    """``whole`` with ``offsets`` and ``tokens`` of this rank's own rows, which begin at token ``done`` of those that
    it has; and of each response token, [C], the rank whose row it is of. ``owners``: of its rows and any after them.
    """
    lengths = whole.offsets.diff()
    owner = owners[: len(lengths)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[owner == ranks.rank].cumsum(0)])
    part = replace(whole, offsets=offsets, tokens=slice(done, done + int(offsets[-1])))
    return part, owner.repeat_interleave(lengths)


def idle_tokens(rows: PackedRows, ranks: Rank) -> MicroBatch:
    """One token a rank that predicts nothing, to be gone through after the micro-batches of ``rows``."""
    return shard_tokens(idle_batch(rows), torch.zeros(0, dtype=torch.int64), ranks)


def shard_tokens(batch: MicroBatch, owners: Tensor, ranks: Rank) -> MicroBatch:
    """This rank's tokens of a micro-batch. ``owners`` [K]: of each of its response tokens, whose row it is of.

    Tokens that are added to make n divide them are rows of their own.
    """
    tokens = batch.input_ids.shape[1]
    each = -(-tokens // ranks.size)
    added = each * ranks.size - tokens
    part = slice(ranks.rank * each, (ranks.rank + 1) * each)
    computing = batch.predicting // max(1, each)
    here, mine = computing == ranks.rank, owners == ranks.rank
    arriving = computing[mine].argsort(stable=True)
    return replace(
        batch,
        input_ids=pad(batch.input_ids, (0, added))[:, part],
        position_ids=pad(batch.position_ids, (0, added))[:, part],
        runs=(*batch.runs, (added, 1)) if added else batch.runs,
        predicting=batch.predicting[here] - part.start,
        targets=batch.targets[here],
        route=Route(
            ranks,
            sent=owners[here].bincount(minlength=ranks.size).tolist(),
            received=computing[mine].bincount(minlength=ranks.size).tolist(),
            order=arriving.argsort(),
        ),
    )


def gather_rows(rows: PackedRows, ranks: Rank, device: torch.device) -> tuple[PackedRows, Tensor]:
    """The rows of all ranks, one rank's after the other's, and [R] int64, the rank that each is of."""
    own = torch.cat([rows.offsets.diff(), rows.prompt_lengths, rows.tokens])
    sizes = all_gather(ranks.group, torch.tensor([len(rows), len(rows.tokens)], device=device))
    numbers = [2 * count + tokens for count, tokens in sizes.tolist()]
    gathered = all_gather(ranks.group, pad(own, (0, max(numbers) - len(own))).to(device))
    found = [
        message[:number].split([count, count, tokens])
        for message, number, (count, tokens) in zip(gathered, numbers, sizes.tolist(), strict=True)
    ]
    lengths, prompts, tokens = (torch.cat(parts) for parts in zip(*found, strict=True))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return PackedRows(tokens, offsets, prompts), torch.arange(ranks.size).repeat_interleave(sizes[:, 0])
