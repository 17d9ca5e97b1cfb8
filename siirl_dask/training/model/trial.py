"""Tries a network when it is built: packed, short rows must score as each does by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from siirl_dask.devices.operators import REFERENCE, TORCH
from siirl_dask.errors import ConfigError
from siirl_dask.images import Image
from siirl_dask.images.noise import noise
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.trainer import PackedRows, RowImages

if TYPE_CHECKING:
    from siirl_dask.training.model.network import Network

_TEXT = (((0,), (1, 2)), ((3, 4), (5, 0)), ((3, 4), (1, 5)))
"""Prompts and responses: two of them share a prompt."""


def trial_rows(vocabulary: int, inputs: ImageInputs | None) -> PackedRows:
    """Return three rows of text, of which two share a prompt, and with ``inputs`` five that show images: two that share
    a prompt, one in the same words about another image, one of two images, and one that ends with its image.
    """
    if inputs is None:
        return _rows([([*prompt], [*response], ()) for prompt, response in _TEXT], range(vocabulary))
    mark = inputs.image_token
    ordinary = [token for token in range(vocabulary) if token != mark]
    first, second, third = (
        noise(width, height, seed) for seed, (width, height) in enumerate(((72, 48), (72, 48), (32, 64)))
    )
    one, other = ([-1] * inputs.tokens(image) for image in (first, third))
    rows: list[tuple[list[int], list[int], tuple[Image, ...]]] = [
        ([0, *one, 1], [2, 3], (first,)),
        ([0, *one, 1], [4], (first,)),
        ([0, *one, 1], [2, 3], (second,)),
        ([0, *one, 1, *other, 2], [5], (first, third)),
        ([3, *other], [1, 2], (third,)),
    ]
    rows += [([*prompt], [*response], ()) for prompt, response in _TEXT]
    return _rows(rows, ordinary, mark)


def _rows(
    rows: Sequence[tuple[list[int], list[int], tuple[Image, ...]]], ordinary: Sequence[int], mark: int = -1
) -> PackedRows:
    """Pack prompts, responses and images. Number t stands for the t-th ordinary token, -1 for a placeholder."""
    tokens = [mark if t < 0 else ordinary[t % len(ordinary)] for prompt, response, _ in rows for t in prompt + response]
    groups = list(dict.fromkeys(images for *_, images in rows))
    return PackedRows(
        torch.tensor(tokens),
        torch.tensor([0, *(len(prompt) + len(response) for prompt, response, _ in rows)]).cumsum(0),
        torch.tensor([len(prompt) for prompt, *_ in rows]),
        RowImages(groups, torch.tensor([groups.index(images) for *_, images in rows])),
    )


def use_packed_attention(network: Network, path: str, operators: Mapping[str, str] = REFERENCE) -> None:
    """Switch to packed attention and the library of each operator, and check that the logits stay the same.
    ConfigError if they do not.

    A model may compute more than this network (a soft cap on its logits, a mask of its own), and training on numbers
    other than the sampled ones would go unnoticed.
    """
    name = type(network.model).__name__
    try:
        error, tolerance = network.enable_packed_attention(operators)
    except (TypeError, NotImplementedError, AttributeError) as failure:  # models are built in many ways
        raise ConfigError(f"model.path={path!r}: {name} takes no packed rows: {failure}") from failure
    if not error <= tolerance:  # also for NaN
        fused = [f"{operator} by {library}" for operator, library in operators.items() if library != TORCH]
        kernels = f" with {', '.join(fused)} (trainer.operators, trainer.liger)" if fused else ""
        raise ConfigError(
            f"model.path={path!r}: logits of {name} from packed rows and a linear head{kernels} "
            f"are off by {error:.2g}; this trainer supports decoders such as Llama, Qwen2 and Qwen3"
        )


def rounding(largest: float, dtype: torch.dtype) -> float:
    """Return the tolerance for logits up to ``largest`` from kernels that sum in another order.

    GPUs have a kernel per shape, and the last digit of bfloat16 alone is more than 1e-3.
    """
    return max(1e-3, 4 * torch.finfo(dtype).eps) * max(1.0, largest)
