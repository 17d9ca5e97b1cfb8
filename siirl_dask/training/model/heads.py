"""The policy's network: log-probs of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl_dask.config import TrainerConfig
from siirl_dask.models.routing import Routing
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.model.logprobs import token_logprobs
from siirl_dask.training.model.network import Network
from siirl_dask.training.model.replay import replay_routes
from siirl_dask.training.packing import MicroBatch
from siirl_dask.training.parallel.own_rows import select_own_rows
from siirl_dask.training.parallel.ulysses import to_owners


class PolicyNetwork(Network):
    """A causal model. ``forward`` gives log-prob, entropy and collision probability at
    ``temperature`` of each response token, [K] each.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        temperature: float,
        float32_head: bool = False,
        autocast: bool = False,
        trainer: TrainerConfig | None = None,
        agents: Sequence[str] = ("",),
        inputs: ImageInputs | None = None,
        always: bool = False,
        routing: Routing | None = None,
    ) -> None:
        """With ``float32_head`` logits are products in float32, whatever the dtype of the hidden
        states. With ``routing`` it replays the routes of a micro-batch that has some.
        """
        super().__init__(
            model,
            device=device,
            autocast=autocast,
            trainer=trainer,
            agents=agents,
            inputs=inputs,
            always=always,
        )
        self.temperature = temperature
        self._float32_head = float32_head
        if routing is not None:
            replay_routes(model, routing)
            self._packed_alone = True

    def _named_as_in_files(self) -> nn.Module:
        return self.model

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        if not batch.input_ids.numel():
            none = torch.zeros(0, device=self.device)
            return none, none.clone(), none.clone()
        head = self.model.get_output_embeddings()
        hidden = self.predicting_states(batch)
        logprobs, entropy, collision = token_logprobs(
            hidden,
            head.weight,
            head.bias,
            batch.targets.to(self.device),
            temperature=self.temperature,
            output=self._head_output,
            float32=self._float32_head,
        )
        if batch.route is not None:
            logprobs, entropy, collision = to_owners([logprobs, entropy, collision], batch.route)
        if batch.own_rows is not None:
            logprobs, entropy, collision = select_own_rows(
                [logprobs, entropy, collision], batch.own_rows
            )
        # FSDP puts a hook on each result, which must be no view
        return logprobs.clone(), entropy.clone(), collision.clone()
