"""A feed-forward layer of experts, of which each rank computes some: what Qwen3-MoE computes, token
for token.

megatron-core's own ``MoELayer`` is not used. Its dispatcher makes a CUDA stream when it is built,
so that nothing of it could be tried without a GPU, and it refuses to learn with tensor parallelism
unless sequence parallelism is on.
"""

from __future__ import annotations

from itertools import compress

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from siirl_dask.training.megatron.families import ExpertMixture
from siirl_dask.training.megatron.grid import RankGrid
from siirl_dask.training.parallel.all_to_all import exchange


class Experts(nn.Module):
    """The layer of this rank. No token is dropped, however many choose the same expert.

    Of the ranks that share a layer's other parameters each takes an equal part of its tokens to the
    experts. Unless they split them anyway, they all have all tokens, and get the results of all.
    """

    def __init__(
        self,
        mixture: ExpertMixture,
        hidden: int,
        grid: RankGrid,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Parameters are without values."""
        super().__init__()
        self._mixture = mixture
        self._grid = grid
        here = mixture.experts // grid.experts

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate = nn.Linear(hidden, mixture.experts, bias=False, device=device, dtype=dtype)
        self._routes: Tensor | None = None
        self.gate_up_proj = parameter(here, 2 * mixture.width, hidden)
        self.down_proj = parameter(here, hidden, mixture.width)

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """Return the weighted sums of what each token's experts compute, and no bias. [T, 1, D]
        -> [T, 1, D].
        """
        tokens = hidden.flatten(0, 1)
        group = self._grid.tp
        count = len(tokens)
        has_all = self._grid.tensor > 1
        if self._grid.split_tokens:
            has_all = False
        if has_all:  # all parts are equal: tokens of zeros fill up the last one
            tokens = pad(tokens, (0, 0, 0, -count % self._grid.tensor))
        weights, chosen = self._route(tokens)
        if has_all:
            tokens, weights = (
                scatter_to_sequence_parallel_region(each, group) for each in (tokens, weights)
            )
            chosen = chosen.chunk(self._grid.tensor)[self._grid.part]
        result = self._by_experts(tokens, weights, chosen)
        if has_all:
            result = gather_from_sequence_parallel_region(
                result, tensor_parallel_output_grad=False, group=group
            )
        return result[:count].view_as(hidden), None

    def go_by(self, routes: Tensor | None, place: int) -> None:
        """Let tokens go to the experts of ``routes``, of which this layer's are those at ``place``,
        from now on.

        [T, W] int64, see ``CoreRows``; None: the router chooses.
        """
        of_layer = slice(place * self._mixture.chosen, (place + 1) * self._mixture.chosen)
        self._routes = None if routes is None else routes[:, of_layer]

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the k experts of each token, and their weights, as transformers does. [T, D] ->
        [T, k] twice.

        By ``go_by`` tokens go where the routes say, weighed by the router's own probabilities.
        """
        probabilities = self.gate(tokens).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._mixture.chosen, dim=-1)
        if self._routes is not None:
            routes = pad(self._routes, (0, 0, 0, len(tokens) - len(self._routes)), value=-1)
            chosen = torch.where(routes < 0, chosen, routes)
            weights = probabilities.gather(-1, chosen)
        if self._mixture.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(tokens.dtype), chosen

    def _by_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Take each token to its experts and back, and weigh what they give. [N, D], [N, k]
        twice -> [N, D].
        """
        choices = chosen.flatten()
        order = choices.argsort(stable=True)  # by expert, and so by rank
        sent = choices.bincount(minlength=self._mixture.experts).view(self._grid.experts, -1)
        there = tokens[order // self._mixture.chosen]
        if self._grid.experts == 1:
            computed = self._compute(there, sent[0])
        else:
            received = torch.empty_like(sent)  # [ranks, experts of this rank]
            dist.all_to_all_single(received, sent, group=self._grid.ep)
            to_ranks = sent.sum(1).tolist()
            from_ranks = received.sum(1).tolist()
            # by rank, and of each by expert
            arrived = exchange(there, to_ranks, from_ranks, self._grid.ep)
            number = torch.arange(sent.shape[1], device=sent.device).repeat(len(sent))
            to_experts = number.repeat_interleave(received.flatten()).argsort(stable=True)
            back = self._compute(arrived[to_experts], received.sum(0))[to_experts.argsort()]
            computed = exchange(back, from_ranks, to_ranks, self._grid.ep)
        in_turn: Tensor = computed[order.argsort()].unflatten(0, chosen.shape)
        return (in_turn * weights[..., None]).sum(1)

    def _compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Compute tokens that are sorted by the experts of this rank, of which each has ``counts``.
        [M, D] -> [M, D].

        The result is in the graph even if there are none: the ranks exchange gradients as well.
        """
        sizes = counts.tolist()
        parts = tokens.split(sizes)
        # unbound at once: the gradient of one expert's slice would be as large as that of all
        both = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        used = zip(compress(parts, sizes), compress(both, sizes), strict=True)
        computed = [_feed_forward(part, gate_up, down) for part, (gate_up, down) in used]
        if computed:
            return torch.cat(computed)
        return tokens


def _feed_forward(tokens: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = linear(tokens, gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, down)
