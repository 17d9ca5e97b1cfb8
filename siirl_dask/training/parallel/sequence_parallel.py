"""Micro-batches of a sequence-parallel group: cut from the rows of all its ranks, each rank with
1/n of the tokens.
"""

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


def shared_batches(
    rows: PackedRows,
    ranks: Rank,
    budget: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Cut the rows of all ``ranks`` into micro-batches, the same number on each rank. All of them
    must call.

    ``budget`` is the tokens of one rank, so a micro-batch of n ranks has n times as many. For the
    fields of a sequence-parallel MicroBatch see there.
    """
    union, owners = gather_rows(rows, ranks, device)
    batches = []
    first = 0
    done = 0
    for whole in micro_batches(union, budget * ranks.size, share=False):
        part, owner = own_rows(whole, owners[first:], ranks, done)
        batches.append(shard_tokens(part, owner, ranks))
        first = first + len(whole.offsets) - 1
        done = part.tokens.stop
    return batches


def own_rows(
    whole: MicroBatch,
    owners: Tensor,
    ranks: Rank,
    done: int,
) -> tuple[MicroBatch, Tensor]:
    """Return ``whole`` with the ``offsets`` and ``tokens`` of this rank's own rows, and the owner
    of each token, [C].

    ``owners`` gives the rank that each row belongs to, beginning with the rows of ``whole``.
    ``done`` is the number of this rank's response tokens in earlier micro-batches.
    """
    lengths = whole.offsets.diff()
    owner = owners[: len(lengths)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[owner == ranks.rank].cumsum(0)])
    part = replace(whole, offsets=offsets, tokens=slice(done, done + int(offsets[-1])))
    return part, owner.repeat_interleave(lengths)


def idle_tokens(rows: PackedRows, ranks: Rank) -> MicroBatch:
    """Return a micro-batch of one token per rank that predicts nothing, to run after the
    micro-batches of ``rows``.
    """
    return shard_tokens(idle_batch(rows), torch.zeros(0, dtype=torch.int64), ranks)


def shard_tokens(batch: MicroBatch, owners: Tensor, ranks: Rank) -> MicroBatch:
    """Return this rank's 1/n of a micro-batch's tokens. ``owners`` [C] is the rank that each
    response token belongs to.

    Tokens added to make n divide their number are rows of their own.
    """
    tokens = batch.input_ids.shape[1]
    each = -(-tokens // ranks.size)
    added = each * ranks.size - tokens
    part = slice(ranks.rank * each, (ranks.rank + 1) * each)
    computing = batch.predicting // max(1, each)  # [C], rank that computes each score
    here = computing == ranks.rank
    own = owners == ranks.rank
    arriving = computing[own].argsort(stable=True)  # scores arrive by the rank that computed them
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
            received=computing[own].bincount(minlength=ranks.size).tolist(),
            order=arriving.argsort(),
        ),
    )


def gather_rows(rows: PackedRows, ranks: Rank, device: torch.device) -> tuple[PackedRows, Tensor]:
    """Gather the rows of all ranks, rank after rank. Returns them and the rank that each belongs
    to, [R] int64.
    """
    own = torch.cat([rows.offsets.diff(), rows.prompt_lengths, rows.tokens])
    own_size = torch.tensor([len(rows), len(rows.tokens)], device=device)
    sizes = all_gather(ranks.group, own_size)
    numbers = [2 * count + token_count for count, token_count in sizes.tolist()]
    padded = pad(own, (0, max(numbers) - len(own)))  # a collective takes equal lengths
    gathered = all_gather(ranks.group, padded.to(device))
    lengths_of_ranks = []
    prompts_of_ranks = []
    tokens_of_ranks = []
    for message, number, (count, token_count) in zip(
        gathered, numbers, sizes.tolist(), strict=True
    ):
        lengths, prompts, tokens = message[:number].split([count, count, token_count])
        lengths_of_ranks.append(lengths)
        prompts_of_ranks.append(prompts)
        tokens_of_ranks.append(tokens)
    ends = torch.cat(lengths_of_ranks).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    rows = PackedRows(torch.cat(tokens_of_ranks), offsets, torch.cat(prompts_of_ranks))
    return rows, torch.arange(ranks.size).repeat_interleave(sizes[:, 0])
