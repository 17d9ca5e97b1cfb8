"""A critic in plain torch: the policy's architecture and weights, with one number a token in place of its logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from siirl_dask.algorithms import Aggregation, TokenLoss, ValueInputs, ValueLossFn, token_mean
from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.learner import Learner, kept
from siirl_dask.training.network import PackedNetwork
from siirl_dask.training.packing import MicroBatch, micro_batches
from siirl_dask.training.trainer import PackedRows, ValueBatch


class TorchCritic:
    """Its head begins at 0, so that it foresees nothing until it has learned to."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, *, device: str = "cpu", rank: Rank) -> None:
        self._network = PackedNetwork(model, temperature=1.0, device=device)
        self._body: nn.Module = self._network.model.get_decoder()
        self._head = nn.Linear(self._network.model.get_output_embeddings().in_features, 1).to(self._network.device)
        for parameter in self._head.parameters():
            nn.init.zeros_(parameter)
        self._budget = trainer.max_tokens_per_micro_batch
        self._learner = Learner([parameter for _, parameter in self._parameters()], trainer, rank)

    @torch.no_grad()
    def values(self, rows: PackedRows) -> Tensor:
        """[K] float32: before each response token, the reward that is still to come."""
        return torch.cat([self._values(part) for part in micro_batches(rows, self._budget)]).cpu()

    def update(
        self, batches: Sequence[ValueBatch], loss_fn: ValueLossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        """One optimiser step per mini-batch; for the metrics see ``Learner.update``."""
        return self._learner.update(batches, partial(self._losses, loss_fn), aggregate)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the decoder and of the ``value_head``; the live ones: copy what you keep."""
        for name, parameter in self._parameters():
            yield name, parameter.detach()

    def close(self) -> None:
        """Free the weights; nothing can be foreseen or learned any more."""
        del self._network, self._body, self._head, self._learner

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._body.named_parameters(prefix="model")
        yield from self._head.named_parameters(prefix="value_head")

    def _values(self, part: MicroBatch) -> Tensor:
        hidden = self._network.predicting_states(part)
        return self._head(hidden.float()).squeeze(-1)  # type: ignore[no-any-return]

    def _losses(self, loss_fn: ValueLossFn, batch: ValueBatch) -> Iterator[tuple[TokenLoss, Tensor]]:
        for part in micro_batches(batch.rows, self._budget):
            values = self._values(part)
            mine = kept(batch, part, values.device)
            inputs = ValueInputs(
                values=mine.of_part(values),
                old_values=mine.of_batch(batch.old_values),
                returns=mine.of_batch(batch.returns),
                offsets=mine.offsets,
            )
            yield loss_fn(inputs), mine.offsets
