"""How layers compute: compiled, again in the backward pass instead of keeping their activations, or
in bfloat16 from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from siirl_dask.devices import accelerator
from siirl_dask.training.model.attention import leave_uncompiled


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer except its attention with torch.compile, once for all lengths."""
    leave_uncompiled()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def recompute(layers: Iterable[nn.Module]) -> None:
    """Keep only each layer's input for the backward pass, which computes the rest again
    (arXiv:1604.06174).
    """
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def narrow_hidden_states(modules: Iterable[Any]) -> None:
    """Let autocast's dtype be that of hidden states as well, where autocast is on.

    Autocast changes products of matrices alone. Embeddings give float32, and so does a norm, which
    multiplies by a weight in float32; a sum with either is float32 too. Nor does autocast know the
    grouped products of experts. ``modules`` are all of a model's, adapters included.
    """
    for module in modules:
        own = [*module.parameters(recurse=False)]
        dimensions = {parameter.ndim for parameter in own}
        if dimensions == {1} or isinstance(module, nn.Embedding):  # scales and shifts: a norm
            module.register_forward_hook(_narrow_output)
        elif 3 in dimensions:  # a matrix for each expert
            module.forward = partial(_with_narrow_weights, module, module.forward)
        elif hasattr(module, "cast_input_dtype_enabled"):
            # peft's layers would make their input float32
            module.cast_input_dtype_enabled = False


def _narrow_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.to(accelerator.arithmetic_dtype(output))
    return output


def _with_narrow_weights(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Compute with copies of the module's own weights in autocast's dtype, which calls this
    again with these.
    """
    narrow: dict[str, Tensor] = {}  # torch.compile takes no dict[str, Tensor]()
    for name, weight in module.named_parameters(recurse=False):
        dtype = accelerator.arithmetic_dtype(weight)
        if weight.dtype != dtype:
            narrow[name] = weight.to(dtype)
    if narrow:
        return functional_call(module, narrow, args, kwargs)
    return forward(*args, **kwargs)
