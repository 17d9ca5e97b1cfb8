"""Layers that carry a state along a row, over packed rows: state-space models, linear attention,
short convolutions.

transformers' torch implementations of these take no boundaries between rows. Each is called with
rows side by side; all else in the model, attention and feed-forward layers, takes packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from siirl_dask.training.model.row_layout import one_after_another, row_groups, side_by_side
from siirl_dask.training.packing import CurrentPacking

_KINDS = frozenset({"linear_attention", "conv", "mamba", "hybrid", "recurrent"})


def separate_rows_in_mixers(modules: Iterable[nn.Module], current: CurrentPacking) -> int:
    """Let every mixer among the modules see each packed row by itself; return how many there
    are.
    """
    mixers = innermost_mixers(modules)
    for mixer in mixers:
        mixer.forward = torch.compiler.disable(_by_rows(mixer.forward, current))
    return len(mixers)


def innermost_mixers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that mix tokens by a state.

    Such a module has a ``layer_type`` that says so, as those of transformers, or a convolution. If
    a layer and its mixer both say so, the mixer is returned.
    """
    found = [module for module in modules if _mixes_by_state(module)]
    found_ids = {id(module) for module in found}
    innermost = []
    for module in found:
        inner_ids = {id(part) for part in module.modules()} - {id(module)}
        if inner_ids.isdisjoint(found_ids):
            innermost.append(module)
    return innermost


def _mixes_by_state(module: nn.Module) -> bool:
    if getattr(module, "layer_type", None) in _KINDS:
        return True
    return any(isinstance(part, nn.Conv1d) for part in module.children())


def _by_rows(forward: Callable[..., Any], current: CurrentPacking) -> Callable[..., Any]:
    """Return a mixer's forward, of hidden states [1, C, D], that calls the original with rows
    side by side.
    """

    def forward_by_rows(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packing = current.packing
        if packing is None:
            return forward(hidden_states, *args, **kwargs)
        hidden = hidden_states[0]
        if packing.shared is not None:
            (spread,) = packing.shared.spread([hidden[None, None]])
            hidden = spread[0, 0]
        outputs = []
        others: tuple[Any, ...] | None = None
        groups = list(row_groups(packing.runs))
        for part, lengths in zip(
            hidden.split([sum(group) for group in groups]), groups, strict=True
        ):
            output = forward(side_by_side(part, lengths), *args, **kwargs)
            if isinstance(output, tuple):
                others = output[1:]
                output = output[0]
            outputs.append(one_after_another(output, lengths))
        mixed = torch.cat(outputs)
        if packing.shared is not None:
            mixed = packing.shared.gather(mixed[:, None])[:, 0]
        if others is None:
            return mixed[None]
        return (mixed[None], *others)

    return forward_by_rows
