"""Tries a network when it is built: rows in one micro-batch must score as each does by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from siirl_dask.config import ModelConfig
from siirl_dask.devices.operators import REFERENCE, TORCH
from siirl_dask.errors import ConfigError
from siirl_dask.images import Image
from siirl_dask.images.noise import noise
from siirl_dask.models.longest_row import check_sees_all, tokens_to_choose
from siirl_dask.models.spans import trial_length
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.model.row_layout import RowLayout
from siirl_dask.training.model.vision import plain_arguments
from siirl_dask.training.trainer import PackedRows, RowImages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from siirl_dask.training.model.network import Network

logger = logging.getLogger("siirl_dask.training")
_ROUTER = "topkrouter"
_Row = tuple[Sequence[int], Sequence[int]]  # prompt and response


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying a network."""

    layout: RowLayout | None
    """How rows are computed; None: the logits are right in no layout."""
    failures: list[str]
    """Why not in those that were tried before, or in all."""


class RecordedRoutes:
    """Answers of a mixture's routers for the tokens of some passes, given again in a pass over the
    same tokens.

    A token that lies between two experts goes to either by a rounding, and its numbers are others
    then: in bfloat16 that is more than a kernel may differ by. A router looks at one token at a
    time, so no layout of rows can be wrong in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Routers are found by the end that transformers' names for their classes have."""
        self._routers = [each for each in modules if type(each).__name__.lower().endswith(_ROUTER)]
        self._answers: list[list[tuple[Tensor, ...]]] = [[] for _ in self._routers]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the answers of the passes inside."""

        def recorder(answers: list[tuple[Tensor, ...]]) -> Callable[..., None]:
            def record(module: nn.Module, inputs: Any, output: Any) -> None:
                if isinstance(output, tuple):
                    answers.append(output)

            return record

        with ExitStack() as hooks:
            for router, answers in zip(self._routers, self._answers, strict=True):
                handle = router.register_forward_hook(recorder(answers))
                hooks.callback(handle.remove)
            yield

    @contextmanager
    def repeated(self, order: Tensor) -> Iterator[None]:
        """Let the routers give these answers in a pass whose tokens are the recorded ones with the
        numbers ``order``, [T]; where there are others than a router is asked for, its own.
        """

        def repeater(recorded: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
            def repeat(module: nn.Module, inputs: Any, output: Any) -> Any:
                answer = tuple(part[order.to(part.device)] for part in recorded)
                same = [part.shape for part in output] == [part.shape for part in answer]
                return answer if same else output

            return repeat

        with ExitStack() as hooks:
            for router, answers in zip(self._routers, self._answers, strict=True):
                if not answers:
                    continue
                recorded = tuple(
                    torch.cat([answer[part] for answer in answers])
                    for part in range(len(answers[0]))
                )
                handle = router.register_forward_hook(repeater(recorded))
                hooks.callback(handle.remove)
            yield


def trial_rows(
    config: Any, inputs: ImageInputs | None, placeholders: Sequence[int] = ()
) -> PackedRows:
    """Return four rows of text for a model with this config, of its text part: of three short ones
    two share a prompt, and one is longer than windows and chunks. With ``placeholders`` there is
    one more, of which these were sampled. With ``inputs`` there are five more that show images: two
    that share a prompt, one in the same words about another image, one of two images, and one that
    ends with its image.
    """
    vocabulary = config.vocab_size
    text = _text_rows(trial_length(config))
    if inputs is None:
        if placeholders:
            text.insert(1, ([1], [0, *placeholders, 2]))  # rows are packed shortest first
        return _rows([([*prompt], [*response], ()) for prompt, response in text], range(vocabulary))
    mark = inputs.image_token
    ordinary = [token for token in range(vocabulary) if token != mark]
    sampled = [-1 if token == mark else ordinary.index(token) for token in placeholders]
    text.insert(1, ([1], [0, *sampled, 2]))
    first, second, third = (
        noise(width, height, seed)
        for seed, (width, height) in enumerate(((72, 48), (72, 48), (32, 64)))
    )
    one, other = ([-1] * inputs.tokens(image) for image in (first, third))
    rows: list[tuple[list[int], list[int], tuple[Image, ...]]] = [
        ([0, *one, 1], [2, 3], (first,)),
        ([0, *one, 1], [4], (first,)),
        ([0, *one, 1], [2, 3], (second,)),
        ([0, *one, 1, *other, 2], [5], (first, third)),
        ([3, *other], [1, 2], (third,)),
    ]
    rows += [([*prompt], [*response], ()) for prompt, response in text]
    return _rows(rows, ordinary, mark)


def _text_rows(longest: int) -> list[_Row]:
    """Return four rows, of which one has ``longest`` tokens, and two a prompt in common that is
    long enough to be computed once.
    """
    prompt = range(3, 3 + longest // 8)
    return [((0,), (1, 2)), (prompt, (5, 0)), (prompt, (1, 5)), ((3, 4), range(5, 3 + longest))]


def _rows(
    rows: Sequence[tuple[list[int], list[int], tuple[Image, ...]]],
    ordinary: Sequence[int],
    mark: int = -1,
) -> PackedRows:
    """Pack prompts, responses and images. Number t stands for the t-th ordinary token, -1 for a
    placeholder.
    """
    tokens = [
        mark if t < 0 else ordinary[t % len(ordinary)]
        for prompt, response, _ in rows
        for t in prompt + response
    ]
    groups = list(dict.fromkeys(images for *_, images in rows))
    return PackedRows(
        torch.tensor(tokens),
        torch.tensor([0, *(len(prompt) + len(response) for prompt, response, _ in rows)]).cumsum(0),
        torch.tensor([len(prompt) for prompt, *_ in rows]),
        RowImages(groups, torch.tensor([groups.index(images) for *_, images in rows])),
    )


def plain_outputs(
    model: PreTrainedModel, rows: PackedRows, inputs: ImageInputs | None, device: torch.device
) -> Iterator[Tensor]:
    """Yield what the model itself computes before each response token of each row, by itself:
    [K, V] logits, or hidden states [K, D] of a model without a head.
    """
    ends = zip(rows.offsets.tolist()[1:], rows.prompt_lengths.tolist(), strict=True)
    for row, (end, prompt) in enumerate(ends):
        ids = rows.tokens[int(rows.offsets[row]) : end][None].to(device)
        seen: dict[str, Any] = {}
        if inputs is not None and rows.images is not None:
            images = rows.images.groups[int(rows.images.of_row[row])]
            seen = plain_arguments(ids, inputs.pixels(images), inputs.image_token)
        output = model(ids, use_cache=False, **seen)
        has_head = model.get_output_embeddings() is not None
        outputs = output.logits if has_head else output[0]
        yield outputs[0, prompt - 1 : -1]


def use_row_layout(
    network: Network,
    path: str,
    operators: Mapping[str, str] = REFERENCE,
    longest_row: int | None = None,
) -> None:
    """Let the network compute packed rows with the library of each operator, or rows in another
    layout, with a warning, where that does not give the logits of the model itself. ConfigError if
    no layout does, and where packed rows of up to ``longest_row`` tokens, None if that is not
    known, would be too long for it.

    A model may compute more than this network (a bias of positions, a mask of its own), and
    training on numbers other than the sampled ones would go unnoticed.
    """
    name = type(network.model).__name__
    trial = network.find_row_layout(operators)
    if trial.layout is None:
        fused = [
            f"{operator} by {library}"
            for operator, library in operators.items()
            if library != TORCH
        ]
        kernels = ""
        if fused:
            kernels = f" with {', '.join(fused)} (trainer.operators, trainer.liger)"
        reasons = "; ".join(dict.fromkeys(trial.failures))
        raise ConfigError(
            f"model.path={path!r}: this trainer does not compute the log-probs of {name}{kernels} "
            f"as transformers does: {reasons}; docs/models.md has the families that it does"
        )
    if trial.layout is RowLayout.packed:
        network.longest_packed = tokens_to_choose(path)
        if longest_row is not None:
            check_sees_all(ModelConfig(path=path), longest_row)
    else:
        _warn_once(name, trial.layout, trial.failures[0])


@cache
def _warn_once(name: str, layout: RowLayout, reason: str) -> None:
    how = "one by one"
    if layout is RowLayout.padded:
        how = "side by side with padding"
    logger.warning(
        "%s computes no packed rows, but rows %s, which takes longer: %s", name, how, reason
    )


def rounding(largest: float, dtype: torch.dtype) -> float:
    """Return the tolerance for logits up to ``largest`` from kernels that sum in another order.

    GPUs have a kernel per shape, and the last digit of bfloat16 alone is more than 1e-3.
    """
    return max(1e-3, 4 * torch.finfo(dtype).eps) * max(1.0, largest)
