"""Modules that score packed rows with a causal model from a Hugging Face folder."""

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
from siirl_dask.models.adapters import is_adapter
from siirl_dask.training.model.attention import PACKED, ends_for_kernels, leave_uncompiled
from siirl_dask.training.model.liger import use_liger
from siirl_dask.training.model.logprobs import token_logprobs
from siirl_dask.training.model.lora import add_adapters, file_name, first_values, merged, without_adapters
from siirl_dask.training.packing import MicroBatch, Packing, micro_batches
from siirl_dask.training.parallel.own_rows import select_own_rows
from siirl_dask.training.parallel.ulysses import to_owners
from siirl_dask.training.trainer import PackedRows


class Network(nn.Module):
    """A causal model or its decoder. With ``autocast`` it computes in bfloat16; ``adapters`` configures LoRA, if any.

    Dropout is off, so that the policy that is trained is the one that sampled.
    """

    zero_initialised: tuple[str, ...] = ()
    """Names of parameters that begin at 0 because no file has them."""

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
        """Return every parameter by its name in files; with ``tied``, by all its names."""
        return _by_file_name(self, tied)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that learn: all, or with adapters those and the zero-initialised ones."""
        named = self.by_name()
        if self.scaling is None:
            return named
        return {name: each for name, each in named.items() if is_adapter(name) or name in self.zero_initialised}

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

    @torch.no_grad()
    def _begin_adapters(self) -> None:
        for name, parameter in self.by_name().items():
            if is_adapter(name) and not parameter.is_meta:
                parameter.copy_(first_values(name, parameter.shape))

    def predicting_states(self, batch: MicroBatch) -> Tensor:
        """Compute the last hidden state of the token before each response token. [C, D]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = _hidden(self.model, batch, self.device)
        return hidden[batch.predicting.to(self.device)]

    @torch.no_grad()
    def enable_packed_attention(self, liger: bool = False) -> tuple[float, float]:
        """Switch to packed attention, and with ``liger`` to Liger's kernels. Returns the error against plain passes, on
        three short rows of which two share a prompt, and its tolerance.
        """
        lengths, prompts = torch.tensor([3, 4, 4]), torch.tensor([1, 2, 2])
        tokens = torch.tensor([0, 1, 2, 3, 4, 5, 0, 3, 4, 1, 5]) % self.model.config.get_text_config().vocab_size
        head = self.model.get_output_embeddings()
        plain = []
        for row, prompt in zip(tokens.split(lengths.tolist()), prompts.tolist(), strict=True):
            output = self.model(row[None].to(self.device), use_cache=False)
            plain.append((output[0] if head is None else output.logits)[0, prompt - 1 : -1])
        expected = torch.cat(plain)
        if liger:
            use_liger(self.modules(), self.device)
        self.model.set_attn_implementation(PACKED)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        (batch,) = micro_batches(PackedRows(tokens, offsets, prompts), budget=len(tokens))
        hidden = _hidden(self.model, batch, self.device)[batch.predicting.to(self.device)]
        packed = hidden if head is None else head(hidden)
        return (packed - expected).abs().max().item(), rounding(expected.abs().max().item(), expected.dtype)


class PolicyNetwork(Network):
    """A causal model. ``forward`` gives log-prob and entropy at ``temperature`` of each response token, [K] each."""

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
    """The decoder of a causal model with a value head, which begins at 0."""

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


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer except its attention with torch.compile, once for all lengths."""
    leave_uncompiled()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def recompute(layers: Iterable[nn.Module]) -> None:
    """Keep only each layer's input for the backward pass, which computes the rest again (arXiv:1604.06174)."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def use_packed_attention(network: Network, path: str, *, liger: bool = False) -> None:
    """Switch to packed attention, and with ``liger`` to Liger's kernels, and check that the logits stay the same.
    ConfigError if they do not.

    A model may compute more than this network (a soft cap on its logits, a mask of its own), and training on numbers
    other than the sampled ones would go unnoticed.
    """
    name = type(network.model).__name__
    try:
        error, tolerance = network.enable_packed_attention(liger)
    except (TypeError, NotImplementedError) as failure:
        raise ConfigError(f"model.path={path!r}: {name} takes no packed rows: {failure}") from failure
    if not error <= tolerance:  # also for NaN
        kernels = " with Liger's kernels (trainer.liger)" if liger else ""
        raise ConfigError(
            f"model.path={path!r}: logits of {name} from packed rows and a linear head{kernels} "
            f"are off by {error:.2g}; this trainer supports decoders such as Llama, Qwen2 and Qwen3"
        )


def rounding(largest: float, dtype: torch.dtype) -> float:
    """Return the tolerance for logits up to ``largest`` from kernels that sum in another order.

    GPUs have a kernel per shape, and the last digit of bfloat16 alone is more than 1e-3.
    """
    return max(1e-3, 4 * torch.finfo(dtype).eps) * max(1.0, largest)


def _by_file_name(module: nn.Module, tied: bool) -> dict[str, nn.Parameter]:
    return {file_name(name): each for name, each in module.named_parameters(remove_duplicate=not tied)}


def _hidden(model: PreTrainedModel, batch: MicroBatch, device: torch.device) -> Tensor:
    """Compute last hidden states, [T, D]. A mask or a cache would silently mix the rows (log-probs off by 0.5)."""
    output = model.get_decoder()(
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        attention_mask=None,
        use_cache=False,
        packing=Packing(
            batch.runs,
            None if batch.route is None else batch.route.ranks,
            ends_for_kernels(batch.runs, device),
            shared=None if batch.shared is None else batch.shared.to(device),
        ),
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden
