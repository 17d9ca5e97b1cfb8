"""How a network computes the rows of a micro-batch: packed where its model can, with padding or
one by one if not.

All models here are causal: what stands after the end of a row changes nothing in it, so padding
needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl_dask.training.packing import Runs

MOST_PADDING = 1 / 4
"""Share of a group's places that may be padding."""


class RowLayout(StrEnum):
    """Rows of a micro-batch in a model's passes, the fastest layout first."""

    packed = "packed"
    """One after the other in one pass."""
    padded = "padded"
    """Side by side, with padding, in the model's own forward; as many passes as lengths differ."""
    single = "single"
    """Each in a pass of its own."""


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the part of a causal model that gives hidden states; the model itself where it has no
    head.

    ``get_decoder`` of some returns the whole model, as Llama4's, or its head, as ModernBERT's.
    """
    if model.get_output_embeddings() is None:
        return model.get_decoder()
    for part in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(part, PreTrainedModel) and part is not model:
            return part
    return model


def separate_hidden_states(
    model: PreTrainedModel,
    ids: Tensor,
    runs: Runs,
    layout: RowLayout,
) -> Tensor:
    """Compute the last hidden states of whole rows by the model's own forward. [T] ids -> [T, D].

    With a head, hidden states are what reaches it; it computes one token's logits a pass, and these
    are not used.
    """
    groups = list(single_rows(runs) if layout is RowLayout.single else row_groups(runs))
    hidden = []
    for part, lengths in zip(ids.split([sum(group) for group in groups]), groups, strict=True):
        hidden.append(
            one_after_another(_hidden_states(model, side_by_side(part, lengths)), lengths)
        )
    return torch.cat(hidden)


def _hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[n, L] -> [n, L, D]."""
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        states: Tensor = model(ids, use_cache=False)[0]
        return states
    reached: list[Tensor] = []

    def take_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        reached.append(inputs[0])
        return (inputs[0][:, :1],)

    hook = head.register_forward_pre_hook(take_input)
    try:
        model(ids, use_cache=False)
    finally:
        hook.remove()
    return reached[0]


def only_list_of_layers(decoder: nn.Module) -> nn.ModuleList | None:
    """Return a decoder's layers: the one list of modules that is in no other; None where there
    is none, or several.
    """
    lists = list(_outermost_lists(decoder))
    if len(lists) != 1:
        return None
    return lists[0]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def row_groups(runs: Runs) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of neighbouring rows to lay side by side, which are packed shortest first,
    so that no more than a share of each group's places is padding.
    """
    group: list[int] = []
    tokens = 0
    for count, length in runs:
        for _ in range(count):
            places = length * (len(group) + 1)
            if group and tokens + length < (1 - MOST_PADDING) * places:
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
