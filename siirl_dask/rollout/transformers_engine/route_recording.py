"""Records the experts that each token goes to, while transformers' models decode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl_dask.models.routing import Routing, routers

Bytes = NDArray[np.uint8]


class RouteRecorder:
    """Routes of the rows of one batch after the other. W are the bytes of a token's routes."""

    def __init__(self, model: PreTrainedModel, routing: Routing) -> None:
        self._width = routing.width
        self._seen: list[Tensor | None] = [None] * len(routing.layers)
        for place, (_, router) in enumerate(routers(model, routing)):
            router.register_forward_hook(partial(self._note, place))
        self._prompts: list[Bytes] = []
        self._steps: list[Bytes] = []

    def read_prompts(self, of_prompt: Sequence[int], lengths: Sequence[int]) -> None:
        """Begin a batch: take the pass over prompts, padded in front. Row r has prompt
        ``of_prompt[r]``, of ``lengths[r]`` tokens.
        """
        routes = self._take().reshape(max(of_prompt) + 1, -1, self._width)
        self._prompts = [
            routes[at, routes.shape[1] - length :]
            for at, length in zip(of_prompt, lengths, strict=True)
        ]
        self._steps = []

    def read_tokens(self, rows: NDArray[np.intp]) -> None:
        """Take the pass over the latest token of these rows."""
        routes = np.empty((len(self._prompts), self._width), np.uint8)
        routes[rows] = self._take()
        self._steps.append(routes)

    def routes(self, row: int, tokens: int) -> bytes:
        """Return the routes of a row's prompt and of its response of so many ``tokens``, but for
        the last, which the model never saw.
        """
        response = [step[row] for step in self._steps[: tokens - 1]]
        return self._prompts[row].tobytes() + b"".join(each.tobytes() for each in response)

    def _note(self, place: int, router: nn.Module, given: Any, output: Any) -> None:
        self._seen[place] = output[2].to(torch.uint8)  # logits, weights and numbers of the experts

    def _take(self) -> Bytes:
        """Return the routes of the latest pass's tokens. [tokens, W]."""
        seen = [each for each in self._seen if each is not None]
        return torch.stack(seen, dim=1).flatten(1).cpu().numpy()
