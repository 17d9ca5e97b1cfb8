"""Modules that score packed rows with a causal model from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from siirl_dask.config import Part, TrainerConfig
from siirl_dask.devices import accelerator
from siirl_dask.devices.operators import AUTO, LIGER, REFERENCE
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import is_adapter
from siirl_dask.models.routing import Routing
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.model.attention import PACKED, ends_for_kernels
from siirl_dask.training.model.layers import narrow_hidden_states
from siirl_dask.training.model.liger import settle, use_liger
from siirl_dask.training.model.logprobs import token_logprobs
from siirl_dask.training.model.lora import (
    add_adapters,
    by_file_name,
    choose_adapters,
    first_values,
    merged,
    without_adapters,
)
from siirl_dask.training.model.operators import use_operators
from siirl_dask.training.model.replay import replay_routes
from siirl_dask.training.model.trial import rounding, trial_rows
from siirl_dask.training.model.vision import (
    below_head,
    decoder_inputs,
    family_of_model,
    plain_arguments,
    tower_layers,
)
from siirl_dask.training.packing import MicroBatch, Packing, micro_batches
from siirl_dask.training.parallel.own_rows import select_own_rows
from siirl_dask.training.parallel.ulysses import to_owners
from siirl_dask.training.parts import frozen_parts, is_of, stays
from siirl_dask.training.trainer import PackedRows


class Network(nn.Module):
    """A causal model or its part below the head. With ``autocast`` it computes in bfloat16, hidden states included;
    ``trainer`` says how it learns, if it does.

    ``inputs`` lays out images for a model that sees any; with ``always`` its tower runs in each pass. It may have
    adapters of several ``agents``, and computes with those of one at a time, of the first to begin with. Dropout is
    off, so that the policy that is trained is the one that sampled.
    """

    zero_initialised: tuple[str, ...] = ()
    """Names of parameters that begin at 0 because no file has them."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        autocast: bool,
        trainer: TrainerConfig | None = None,
        agents: Sequence[str] = ("",),
        inputs: ImageInputs | None = None,
        always: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.agents, self.agent = tuple(agents), agents[0]
        self.device = device
        self.autocast = autocast
        self.inputs, self._always = inputs, always
        self._family = family_of_model(model)
        self._trainer = trainer
        self._attention = AUTO
        self.scaling: float | None = None
        if trainer is not None and trainer.lora.rank:
            self.scaling = trainer.lora.alpha / trainer.lora.rank
            add_adapters(model, self.layers(), self.tower_layers(), trainer, agents)
            choose_adapters(model, self.agent)
            self.each_adapter(_begin)
        else:
            named, learned = self.by_name(), self.trainable()
            for name in named.keys() - learned.keys():
                named[name].requires_grad_(False)  # now, for FSDP takes it over when it first gathers
        if autocast:
            narrow_hidden_states(model.modules())
        self.eval()

    def by_name(self, *, tied: bool = False) -> dict[str, nn.Parameter]:
        """Return every parameter by its name in files; with ``tied``, by all its names. Of adapters those in use."""
        return by_file_name(self.named_parameters(remove_duplicate=not tied), self.agent)

    def use(self, agent: str) -> None:
        """Compute with the adapters of ``agent`` from now on; ``by_name``, ``trainable`` and ``merged`` have these."""
        if agent != self.agent:
            self.agent = agent
            choose_adapters(self.model, agent)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that learn: all but those of frozen parts, or with adapters those and the
        zero-initialised ones.
        """
        named = self.by_name()
        if self.scaling is None:
            frozen: list[Part] = []
            if self._trainer is not None:
                frozen = frozen_parts(self._trainer, self._family, sees_images=self.inputs is not None)
            return {
                name: each
                for name, each in named.items()
                if name in self.zero_initialised or not stays(name, frozen, self._family)
            }
        return {name: each for name, each in named.items() if is_adapter(name) or name in self.zero_initialised}

    def rates(self, trainer: TrainerConfig | None = None) -> dict[str, float]:
        """Return the learning rates, in units of ``trainer.lr``, of parameters that have another one."""
        trainer = trainer or self._trainer
        if trainer is None or trainer.visual_lr is None or self._family is None:
            return {}
        factor = trainer.visual_lr / trainer.lr
        return {name: factor for name in self.trainable() if is_of(Part.visual, name, self._family)}

    def merged(self, others: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's parameters with adapters merged; ``others`` replace parameters of the same name."""
        named: dict[str, Tensor] = {**self.by_name(), **others}
        return iter(named.items()) if self.scaling is None else merged(named, self.scaling, self.device)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Disable the adapters inside the ``with`` block. TypeError when there are none."""
        if self.scaling is None:
            raise TypeError("there are no adapters to leave out: give the role's trainer a lora.rank")
        return without_adapters(self)

    def reshard(self) -> None:
        """Free parameters that were gathered for passes without a backward. FSDP replaces this method."""

    def layers(self) -> list[nn.Module]:
        """Return the decoder's layers. ConfigError when it has no attribute ``layers``."""
        layers = getattr(self.model.get_decoder(), "layers", None)
        if not isinstance(layers, Iterable):
            raise ConfigError(
                f"{type(self.model).__name__} has no layers to shard, compute again or compile one by one; "
                "take trainer.backend=torch without trainer.gradient_checkpointing"
            )
        return list(layers)

    def tower_layers(self) -> list[nn.Module]:
        """Return the layers of the tower that sees images; none for a model of text."""
        return tower_layers(self.model)

    def each_adapter(self, do: Callable[[str, nn.Parameter], None]) -> None:
        """Call ``do(name, parameter)`` for the adapters of all agents, by their names in files."""
        for agent in reversed(self.agents):  # so that the first one's are in use
            self.use(agent)
            for name, parameter in self.by_name().items():
                if is_adapter(name):
                    do(name, parameter)

    def predicting_states(self, batch: MicroBatch) -> Tensor:
        """Compute the last hidden state of the token before each response token. [C, D]."""
        with accelerator.autocast(self.device, enabled=self.autocast):
            hidden = self._hidden(batch)
        return hidden[batch.predicting.to(self.device)]

    @torch.no_grad()
    def enable_packed_attention(self, operators: Mapping[str, str] = REFERENCE) -> tuple[float, float]:
        """Switch to packed attention, and to the library of each operator. Returns the error against plain passes, on
        the short rows of ``trial_rows``, and its tolerance.
        """
        rows = trial_rows(self.model.config.get_text_config().vocab_size, self.inputs)
        head = self.model.get_output_embeddings()
        expected = torch.cat([*self._plain_outputs(rows)])
        operators = settle(operators, self.modules(), self.device)
        if ligers := [operator for operator, library in operators.items() if library == LIGER]:
            use_liger(self.modules(), self.device, ligers)
        use_operators(self.modules(), operators)
        self._attention = operators["attention"]
        self.model.get_decoder().set_attn_implementation(PACKED)
        (batch,) = micro_batches(rows, budget=len(rows.tokens), inputs=self.inputs)
        hidden = self._hidden(batch)[batch.predicting.to(self.device)]
        packed = hidden if head is None else head(hidden)
        return (packed - expected).abs().max().item(), rounding(expected.abs().max().item(), expected.dtype)

    def _plain_outputs(self, rows: PackedRows) -> Iterator[Tensor]:
        """Yield what the model itself computes before each response token of each row, by itself: [K, V] logits, or
        hidden states [K, D] of a model without a head.
        """
        ends = zip(rows.offsets.tolist()[1:], rows.prompt_lengths.tolist(), strict=True)
        for row, (end, prompt) in enumerate(ends):
            ids = rows.tokens[int(rows.offsets[row]) : end][None].to(self.device)
            seen: dict[str, Any] = {}
            if self.inputs is not None and rows.images is not None:
                images = rows.images.groups[int(rows.images.of_row[row])]
                seen = plain_arguments(ids, self.inputs.pixels(images), self.inputs.image_token)
            output = self.model(ids, use_cache=False, **seen)
            yield (output[0] if self.model.get_output_embeddings() is None else output.logits)[0, prompt - 1 : -1]

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Compute last hidden states, [T, D]. A mask or a cache would silently mix the rows (log-probs off by 0.5)."""
        ids, device = batch.input_ids.to(self.device), self.device
        given: dict[str, Any] = {"input_ids": ids}
        if self.inputs is not None:
            given = decoder_inputs(self.model, ids, batch.images, self.inputs, always=self._always)
        output = self.model.get_decoder()(
            **given,
            position_ids=batch.position_ids.to(device),
            attention_mask=None,
            use_cache=False,
            packing=Packing(
                batch.runs,
                None if batch.route is None else batch.route.ranks,
                ends_for_kernels(batch.runs, device),
                shared=None if batch.shared is None else batch.shared.to(device),
                library=self._attention,
                routes=None if batch.routes is None else batch.routes.to(device, torch.int64),
            ),
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


class PolicyNetwork(Network):
    """A causal model. ``forward`` gives log-prob and entropy at ``temperature`` of each response token, [K] each."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        temperature: float,
        autocast: bool = False,
        trainer: TrainerConfig | None = None,
        agents: Sequence[str] = ("",),
        inputs: ImageInputs | None = None,
        always: bool = False,
        routing: Routing | None = None,
    ) -> None:
        """With ``routing`` it replays the routes of a micro-batch that has some."""
        super().__init__(
            model, device=device, autocast=autocast, trainer=trainer, agents=agents, inputs=inputs, always=always
        )
        self.temperature = temperature
        if routing is not None:
            replay_routes(model, routing)

    def by_name(self, *, tied: bool = False) -> dict[str, nn.Parameter]:
        return by_file_name(self.model.named_parameters(remove_duplicate=not tied), self.agent)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if not batch.input_ids.numel():
            return torch.zeros(0, device=self.device), torch.zeros(0, device=self.device)
        head = self.model.get_output_embeddings()
        hidden = self.predicting_states(batch)
        logprobs, entropy = token_logprobs(
            hidden,
            head.weight,
            head.bias,
            batch.targets.to(self.device),
            temperature=self.temperature,
        )
        if batch.route is not None:
            logprobs, entropy = to_owners([logprobs, entropy], batch.route)
        if batch.own_rows is not None:
            logprobs, entropy = select_own_rows([logprobs, entropy], batch.own_rows)
        return logprobs, entropy


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
        super().__init__(below, device=device, autocast=autocast, trainer=trainer, inputs=inputs, always=always)
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


@torch.no_grad()
def _begin(name: str, parameter: nn.Parameter) -> None:
    if not parameter.is_meta:
        parameter.copy_(first_values(name, parameter.shape))
