"""Prompts that several rows of a micro-batch have in common, computed once (Prefix Grouper,
arXiv:2506.05433).

The samples of one prompt lie side by side, and where responses are short, prompts are most of what
they cost. What a model computes for each token by itself, all but attention, it computes for C
tokens: each prompt once, all responses. Attention takes the T tokens of whole rows, as it takes
any: queries, keys and values of a prompt are handed to each of its rows, and the backward pass adds
up their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# share of the tokens that must be saved: handing prompts out and adding up is not for nothing
_LEAST = 1 / 16


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Which of C computed tokens, of which P in prompts come first, are which of T tokens of
    whole rows.
    """

    whole: Tensor
    """[T] int64, the computed token that each token of the whole rows is."""
    first: Tensor
    """[C] int64, the first of the whole rows' tokens that each computed token is."""
    copies: Tensor
    """[P, N] int64, all of the whole rows' tokens that a prompt's token is; the first one again
    where there are fewer than N."""
    counted: Tensor | None
    """[P, N, 1] float32, 0 where ``copies`` has one again; None where it has none."""

    def to(self, device: torch.device) -> SharedPrompts:
        """Return the same on a device."""
        counted = None
        if self.counted is not None:
            counted = self.counted.to(device)
        return SharedPrompts(
            self.whole.to(device), self.first.to(device), self.copies.to(device), counted
        )

    def spread(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of computed tokens as those of whole rows. [1, H, C, D] each -> [1, H,
        T, D].
        """
        apply: Any = _Spread.apply
        return list(apply(self, *tensors))

    def gather(self, output: Tensor) -> Tensor:
        """Return what is computed for whole rows as that of computed tokens. [T, H, D] -> [C, H,
        D].
        """
        apply: Any = _Gather.apply
        gathered: Tensor = apply(self, output)
        return gathered


def find_shared(
    group: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    places: Tensor,
) -> SharedPrompts | None:
    """Return which prompts neighbouring rows share; None where little would be saved.

    Row r of R has ``lengths[r]`` tokens, of which its prompt's come first, and ``group[r]`` as
    ``same_prompts`` says. In the pack of whole rows it begins at ``places[r]``. [R] each.
    """
    # [G], first row of each group
    leaders = torch.cat([group.new_ones(1), group.diff()]).nonzero().squeeze(1)
    prompts = prompt_lengths[leaders]
    responses = lengths - prompt_lengths
    total = int(lengths.sum())
    computed = int(prompts.sum() + responses.sum())
    if total - computed < _LEAST * total:
        return None
    in_prompts = _within(prompts)
    group_of = torch.arange(len(leaders)).repeat_interleave(prompts)  # [P]
    members, own = _members(group, leaders)
    copies = places[members][group_of] + in_prompts[:, None]
    in_responses = _within(responses)
    answers = (places + prompt_lengths).repeat_interleave(responses) + in_responses
    first = torch.cat([copies[:, 0], answers])
    whole = torch.empty(total, dtype=torch.int64)
    whole[copies] = torch.arange(len(copies))[:, None].expand_as(copies)
    whole[answers] = torch.arange(len(copies), computed)
    counted = None
    if not bool(own.all()):
        counted = own[group_of].float()[:, :, None]
    return SharedPrompts(whole, first, copies, counted)


def same_prompts(
    tokens: Tensor,
    begins: Tensor,
    lengths: Tensor,
    shown: Tensor | None,
    routes: Tensor | None = None,
) -> Tensor:
    """Number the runs of neighbouring rows that have the same prompt, [R].

    Row r's prompt has ``lengths[r]`` of the ``tokens``, from ``begins[r]`` on, and shows the images
    ``shown[r]``: two questions in the same words may be about two pictures. None: no row shows any.
    With ``routes`` [tokens, W] the prompts' must be the same as well: engines that round
    differently may have taken others.
    """
    same = lengths[1:] == lengths[:-1]
    if shown is not None:
        same &= shown[1:] == shown[:-1]
    own = lengths[1:] * same
    within = _within(own)
    here, before = (each.repeat_interleave(own) + within for each in (begins[1:], begins[:-1]))
    differ = tokens[here] != tokens[before]
    if routes is not None:
        differ |= (routes[here] != routes[before]).any(1)
    row = torch.arange(len(own)).repeat_interleave(own)
    same &= torch.zeros(len(own), dtype=torch.int64).index_add_(0, row, differ.long()) == 0
    return torch.cat([begins.new_zeros(1), (~same).cumsum(0)])


def _members(group: Tensor, leaders: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of each group, its first one again where another has more, and which are none
    of these. [R], [G] -> [G, N], [G, N] bool.
    """
    sizes = torch.cat([leaders, leaders.new_tensor([len(group)])]).diff()
    place = torch.arange(int(sizes.max()))
    own = place < sizes[:, None]
    return leaders[:, None] + place * own, own


def _within(lengths: Tensor) -> Tensor:
    """Return 0, 1, ... for each of some lengths, one after the other."""
    begins = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - begins.repeat_interleave(lengths)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedPrompts, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        return tuple(each.index_select(2, shared.whole) for each in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the gradients of a prompt's copies, always in the same order: ``index_add`` has
        none on a GPU.
        """
        shared = ctx.shared
        prompts, most = shared.copies.shape
        added_up = []
        for gradient in gradients:  # [1, H, T, D] -> [1, H, C, D]
            copies = gradient.index_select(2, shared.copies.flatten()).unflatten(2, (prompts, most))
            if shared.counted is not None:
                copies = copies * shared.counted.to(copies.dtype)
            answers = gradient.index_select(2, shared.first[prompts:])
            added_up.append(torch.cat([copies.sum(3), answers], dim=2))
        return None, *added_up


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedPrompts, output: Tensor) -> Tensor:
        ctx.shared = shared
        ctx.tokens = len(output)
        return output.index_select(0, shared.first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole = gradient.new_zeros(ctx.tokens, *gradient.shape[1:])
        whole[ctx.shared.first] = gradient
        return None, whole
