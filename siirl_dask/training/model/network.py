"""Causal models from a Hugging Face folder as modules that score packed rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from siirl_dask.config import TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.training.model.attention import PACKED, leave_uncompiled
from siirl_dask.training.model.logprobs import token_logprobs
from siirl_dask.training.model.lora import add_adapters, file_name, first_values, is_adapter, merged, without_adapters
from siirl_dask.training.packing import MicroBatch, Packing, micro_batches
from siirl_dask.training.parallel.own_rows import select_own_rows
from siirl_dask.training.parallel.ulysses import to_owners
from siirl_dask.training.trainer import PackedRows


class Network(nn.Module):
    """``model``, a causal one or its decoder; with ``autocast`` it computes in bfloat16. Dropout is off: the policy
    that is trained is the one that sampled. ``adapters`` says which there are, if any (LoRA).
    """

    zero_initialised: tuple[str, ...] = ()
    """Parameters that no file has: they begin at 0."""

    def __init__(
        self, model: PreTrainedModel, *, device: torch.device, autocast: bool, adapters: TrainerConfig | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.device = device
        self.autocast = autocast
        self.scaling: float | None = None
        if adapters is not None and adapters.lora.rank:
            self.scaling = adapters.lora.alpha / adapters.lora.rank
            add_adapters(model, self.layers(), adapters)
            self._begin_adapters()
        self.eval()

    def by_name(self, *, tied: bool = False) -> dict[str, nn.Parameter]:
        """Every parameter by the name that its file has for it; with ``tied``, by all of its names."""
        return _by_file_name(self, tied)

    def trainable(self) -> dict[str, nn.Parameter]:
        """All of them, or where there are adapters, those and what no file has."""
        named = self.by_name()
        if self.scaling is None:
            return named
        return {name: each for name, each in named.items() if is_adapter(name) or name in self.zero_initialised}

    def merged(self, others: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that the model has without adapters, with what they add; ``others`` stand in for some."""
        named: dict[str, Tensor] = {**self.by_name(), **others}
        return iter(named.items()) if self.scaling is None else merged(named, self.scaling, self.device)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, it computes as the folder's model does. TypeError when there are none."""
        if self.scaling is None:
            raise TypeError("there are no adapters to leave out: give the role's trainer a lora.rank")
        return without_adapters(self)

    def reshard(self) -> None:
        """Let go of parameters that were gathered for passes without a backward; FSDP puts its own method over this
        one.
        """

    def layers(self) -> list[nn.Module]:
        """The decoder's. ConfigError when it has none by that name."""
        layers = getattr(self.model.get_decoder(), "layers", None)
        if not isinstance(layers, Iterable):
            raise ConfigError(
                f"{type(self.model).__name__} has no layers to shard, compute again or compile one by one; "
                "take trainer.backend=torch without trainer.gradient_checkpointing"
            )
        return list(layers)

    @torch.no_grad()
    def _begin_adapters(self) -> None:
        for name, parameter in self.by_name().items():
            if is_adapter(name) and not parameter.is_meta:
                parameter.copy_(first_values(name, parameter.shape))

    def predicting_states(self, batch: MicroBatch) -> Tensor:
        """Last hidden state of the token before each response token. [K, D]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = _hidden(self.model, batch, self.device)
        return hidden[batch.predicting.to(self.device)]

    @torch.no_grad()
    def enable_packed_attention(self) -> tuple[float, float]:
        """From here on rows are packed. On two short ones: how far that is off a plain pass, and how far it may be."""
        lengths = torch.tensor([2, 3])
        tokens = torch.arange(5) % self.model.config.get_text_config().vocab_size
        plain = [self.model(row[None].to(self.device), use_cache=False) for row in tokens.split([2, 3])]
        head = self.model.get_output_embeddings()
        expected = torch.cat([(output[0] if head is None else output.logits)[0] for output in plain])
        self.model.set_attn_implementation(PACKED)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        (batch,) = micro_batches(PackedRows(tokens, offsets, torch.ones_like(lengths)), budget=5)
        hidden = _hidden(self.model, batch, self.device)
        packed = hidden if head is None else head(hidden)
        return (packed - expected).abs().max().item(), rounding(expected.abs().max().item(), expected.dtype)


class PolicyNetwork(Network):
    """Scores tokens. ``forward`` is by [K] response tokens: log-probability and entropy at ``temperature``."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        autocast: bool = False,
        adapters: TrainerConfig | None = None,
        temperature: float,
    ) -> None:
        super().__init__(model, device=device, autocast=autocast, adapters=adapters)
        self.temperature = temperature

    def by_name(self, *, tied: bool = False) -> dict[str, nn.Parameter]:
        return _by_file_name(self.model, tied)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if not batch.input_ids.numel():
            return torch.zeros(0, device=self.device), torch.zeros(0, device=self.device)
        head = self.model.get_output_embeddings()
        hidden = self.predicting_states(batch)
        logprobs, entropy = token_logprobs(
            hidden.bfloat16() if self.autocast else hidden,
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
    """The decoder of a causal model and one number a token in place of its logits, 0 at the beginning."""

    zero_initialised = ("value_head.weight", "value_head.bias")

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        autocast: bool = False,
        adapters: TrainerConfig | None = None,
    ) -> None:
        width = model.get_output_embeddings().in_features
        super().__init__(model.get_decoder(), device=device, autocast=autocast, adapters=adapters)
        embeddings = self.model.get_input_embeddings()
        self.value_head = nn.Linear(width, 1, device=next(embeddings.parameters()).device)
        for parameter in self.value_head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, batch: MicroBatch) -> Tensor:
        """[K]: before each response token, the reward that is still to come."""
        if not batch.input_ids.numel():
            return torch.zeros(0, device=self.device)
        hidden = self.predicting_states(batch).float()
        values = linear(hidden, self.value_head.weight.float(), self.value_head.bias.float())
        values = values.squeeze(-1)
        if batch.route is not None:
            (values,) = to_owners([values], batch.route)
        if batch.own_rows is not None:
            (values,) = select_own_rows([values], batch.own_rows)
        return values.clone()  # FSDP hooks on to what it returns, which must be no view


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """With torch.compile, but for attention; of all lengths alike."""
    leave_uncompiled()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def recompute(layers: Iterable[nn.Module]) -> None:
    """Keep only each layer's input for the backward pass (arXiv:1604.06174), which computes the rest again."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def use_packed_attention(network: Network, path: str) -> None:
    """Switch to it, and see that the logits stay: a model may do more than we compute (a soft cap on its logits, a mask
    of its own), and training on other numbers than were sampled would go unnoticed.
    """
    name = type(network.model).__name__
    try:
        off, allowed = network.enable_packed_attention()
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"model.path={path!r}: {name} takes no packed rows: {error}") from error
    if not off <= allowed:
        raise ConfigError(
            f"model.path={path!r}: logits of {name} from packed rows and a linear head "
            f"are off by {off:.2g}; this trainer supports decoders such as Llama, Qwen2 and Qwen3"
        )


def rounding(largest: float, dtype: torch.dtype) -> float:
    """By how much logits up to ``largest`` may differ where kernels add up in another order: GPUs have one for each
    shape, and their bfloat16 is off by more than 1e-3 from the last digit on.
    """
    return max(1e-3, 4 * torch.finfo(dtype).eps) * max(1.0, largest)


def _by_file_name(module: nn.Module, tied: bool) -> dict[str, nn.Parameter]:
    return {file_name(name): each for name, each in module.named_parameters(remove_duplicate=not tied)}


def _hidden(model: PreTrainedModel, batch: MicroBatch, device: torch.device) -> Tensor:
    """Last hidden states, [T, D]. An attention mask or a cache would silently mix the rows (log-probs off by 0.5)."""
    output = model.get_decoder()(
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        attention_mask=None,
        use_cache=False,
        packing=Packing(batch.runs, None if batch.route is None else batch.route.ranks),
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden
