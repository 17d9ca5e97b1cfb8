"""Allocates memory of the host for copies of tensors: pinned beside an accelerator, where copies
to it are faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_ALIGNMENT = 512  # bytes; a copy can be viewed in any dtype


def host_memory(sizes: Mapping[int, int], *, pinned: bool) -> dict[int, Tensor]:
    """Allocate memory of each size in bytes: uint8 [size] by key, each a storage of its own in
    pieces that they share.

    torch's allocator does not know which copies use it: wait for these before it is given back.
    Pinned memory that was given back stays with the allocator, for the next who asks for as much.
    """
    places, used = share_pieces(sizes)
    pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy() for size in used]
    # a view of a tensor would share its storage, and DCP copies whole storages
    return {
        key: torch.from_numpy(pieces[at][start : start + sizes[key]])
        for key, (at, start) in places.items()
    }


def share_pieces(sizes: Mapping[int, int]) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return the piece and the place in it for each size, and the sizes of the pieces.

    torch rounds pinned memory up to powers of two, so a piece is at most the power of two that
    holds the largest.
    """
    largest = 1 << max([_ALIGNMENT, *sizes.values()]).bit_length()
    used: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        number = next((at for at, taken in enumerate(used) if taken + room <= largest), len(used))
        if number == len(used):
            used.append(0)
        places[key] = number, used[number]
        used[number] += room
    return places, used
