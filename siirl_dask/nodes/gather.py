"""What every worker of a role has, on all of them."""

from __future__ import annotations

from itertools import accumulate, pairwise

from siirl_dask.context import Context


def gather(ctx: Context, mine: bytes) -> list[bytes]:
    """Each worker's bytes, in the order of ranks. All of the node's workers must call it.

    Sums in which each place is one worker's, and zero on the others. For small things: a byte travels as a float64.
    """
    rank, size = ctx.rank.rank, ctx.rank.size
    lengths = ctx.all_sum([float(len(mine) * (at == rank)) for at in range(size)])
    ends = [0, *accumulate(map(int, lengths))]
    places = [0.0] * ends[-1]
    places[ends[rank] : ends[rank + 1]] = map(float, mine)
    everything = bytes(map(int, ctx.all_sum(places)))
    return [everything[start:end] for start, end in pairwise(ends)]
