"""The critic's network: values of tokens by a head of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from siirl_dask.config import TrainerConfig
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.model.network import Network
from siirl_dask.training.model.vision import below_head
from siirl_dask.training.packing import MicroBatch
from siirl_dask.training.parallel.own_rows import select_own_rows
from siirl_dask.training.parallel.ulysses import to_owners


class ValueNetwork(Network):
    """The part of a causal model below its head, with a value head, which begins at 0."""

    zero_initialised = ("value_head.weight", "value_head.bias")

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        autocast: bool = False,
        trainer: TrainerConfig | None = None,
        inputs: ImageInputs | None = None,
        always: bool = False,
    ) -> None:
        width = model.get_output_embeddings().in_features
        below = below_head(model)
        super().__init__(
            below,
            device=device,
            autocast=autocast,
            trainer=trainer,
            inputs=inputs,
            always=always,
        )
        embeddings = self.model.get_input_embeddings()
        self.value_head = nn.Linear(width, 1, device=next(embeddings.parameters()).device)
        for parameter in self.value_head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Predict the return before each response token. [K]."""
        if not batch.input_ids.numel():
            return torch.zeros(0, device=self.device)
        hidden = self.predicting_states(batch).float()
        values = linear(hidden, self.value_head.weight.float(), self.value_head.bias.float())
        values = values.squeeze(-1)
        if batch.route is not None:
            (values,) = to_owners([values], batch.route)
        if batch.own_rows is not None:
            (values,) = select_own_rows([values], batch.own_rows)
        return values.clone()  # FSDP puts a hook on the result, which must be no view
