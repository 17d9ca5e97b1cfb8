"""The module that computes the hidden states of packed rows, with a causal model from a Hugging
Face folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from siirl_dask.config import OptimizerName, TrainerConfig, VisionPart
from siirl_dask.devices import accelerator
from siirl_dask.devices.operators import AUTO, FLASH, FLEX, LIGER, REFERENCE, TORCH
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.models.adapters import is_adapter
from siirl_dask.models.head import head_output
from siirl_dask.models.spans import EAGER
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.model.attention import PACKED, PACKED_PROBE, ends_for_kernels
from siirl_dask.training.model.layers import narrow_hidden_states
from siirl_dask.training.model.liger import settle, use_liger
from siirl_dask.training.model.lora import (
    add_adapters,
    by_file_name,
    choose_adapters,
    first_values,
    merged,
    without_adapters,
)
from siirl_dask.training.model.mixers import separate_rows_in_mixers
from siirl_dask.training.model.operators import use_operators
from siirl_dask.training.model.placeholders import ReplacedTokens, placeholder_ids
from siirl_dask.training.model.row_layout import (
    RowLayout,
    decoder_of,
    only_list_of_layers,
    separate_hidden_states,
)
from siirl_dask.training.model.trial import (
    RecordedRoutes,
    Trial,
    plain_outputs,
    rounding,
    trial_rows,
)
from siirl_dask.training.model.vision import (
    decoder_inputs,
    family_of_model,
    tower_layers,
)
from siirl_dask.training.packing import CurrentPacking, MicroBatch, Packing, micro_batches
from siirl_dask.training.parts import frozen_parts, is_of, stays

_UNFIT = (
    TypeError,
    NotImplementedError,
    AttributeError,
    ValueError,
    KeyError,
    IndexError,
    RuntimeError,
)
"""Raised by models, which are built in many ways, that do not take rows in a layout."""


class Network(nn.Module):
    """A causal model or its part below the head. With ``autocast`` it computes in bfloat16, hidden
    states included; ``trainer`` says how it learns, if it does.

    ``inputs`` lays out images for a model that sees any; with ``always`` its tower runs in each
    pass. It may have adapters of several ``agents``, and computes with those of one at a time, of
    the first to begin with. Dropout is off, so that the policy that is trained is the one that
    sampled.
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
        self.agents = tuple(agents)
        self.agent = agents[0]
        self.device = device
        self.autocast = autocast
        self.inputs = inputs
        self._always = always
        self._family = family_of_model(model)
        self._trainer = trainer
        self._attention = AUTO
        self._current = CurrentPacking()
        self._replaced = ReplacedTokens()
        self._head_output = head_output(model.config.get_text_config())
        self.layout = RowLayout.packed
        """How rows are computed; known once ``find_row_layout`` has tried."""
        self.longest_packed: int | None = None
        """Tokens of a row beyond which packed attention is not the model's; None: no limit."""
        self.mixers = 0
        """Layers that carry a state along a row; known then as well."""
        self._packed_alone = inputs is not None  # images and routes are laid out for packed rows
        self._plain_attention: Any = None
        self.scaling: float | None = None
        if trainer is not None and trainer.lora.rank:
            self.scaling = trainer.lora.alpha / trainer.lora.rank
            add_adapters(model, self.layers(), self.tower_layers(), trainer, agents)
            choose_adapters(model, self.agent)
            self.each_adapter(_begin)
        else:
            named = self.by_name()
            learned = self.trainable()
            for name in named.keys() - learned.keys():
                # now, for FSDP takes it over when it first gathers
                named[name].requires_grad_(False)
        if autocast:
            narrow_hidden_states(model.modules())
        self.eval()

    def by_name(self, *, tied: bool = False) -> dict[str, nn.Parameter]:
        """Return every parameter by its name in files; with ``tied``, by all its names. Of
        adapters those in use.
        """
        return by_file_name(
            self._named_as_in_files().named_parameters(remove_duplicate=not tied), self.agent
        )

    def stored_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are saved with the weights, such as biases of experts, by
        their names in files.
        """
        found: dict[str, Tensor] = {}
        for prefix, module in self._named_as_in_files().named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.removeprefix(f"{prefix}.") not in module._non_persistent_buffers_set:
                    found[name.replace(".base_layer.", ".")] = buffer
        return found

    def _named_as_in_files(self) -> nn.Module:
        """Return the module by whose names parameters go in files."""
        return self

    def use(self, agent: str) -> None:
        """Compute with the adapters of ``agent`` from now on; ``by_name``, ``trainable`` and
        ``merged`` have these.
        """
        if agent != self.agent:
            self.agent = agent
            choose_adapters(self.model, agent)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that learn: all but those of frozen parts, or with adapters those
        and the zero-initialised ones.
        """
        named = self.by_name()
        if self.scaling is None:
            frozen: list[VisionPart] = []
            if self._trainer is not None:
                frozen = frozen_parts(
                    self._trainer, self._family, sees_images=self.inputs is not None
                )
            return {
                name: each
                for name, each in named.items()
                if name in self.zero_initialised or not stays(name, frozen, self._family)
            }
        return {
            name: each
            for name, each in named.items()
            if is_adapter(name) or name in self.zero_initialised
        }

    def rates(self, trainer: TrainerConfig | None = None) -> dict[str, float]:
        """Return the learning rates, in units of ``trainer.lr``, of parameters that have another
        one.
        """
        if trainer is None:
            trainer = self._trainer
        if trainer is None or trainer.visual_lr is None or self._family is None:
            return {}
        factor = trainer.visual_lr / trainer.lr
        return {
            name: factor
            for name in self.trainable()
            if is_of(VisionPart.visual, name, self._family)
        }

    def matrices(self) -> set[str]:
        """Return the names of the parameters that Muon steps; none without
        ``trainer.optimizer=muon``.

        These are the parameters that learn and are linear maps inside the layers of the decoder or
        of a tower: weights [out, in], and stacks of such, as experts are. AdamW steps all others:
        embeddings, head and value head, which lie outside of the layers, and in the layers norms,
        biases, convolutions, maps to a single number, and the 2-D parameters of state-space layers,
        which are not called ``weight``.
        """
        if self._trainer is None or self._trainer.optimizer != OptimizerName.muon:
            return set()
        linear_maps = set()
        for layer in [*self.layers(), *self.tower_layers()]:
            for module in layer.modules():
                if isinstance(module, (nn.Embedding, _ConvNd)):
                    continue
                for name, parameter in module.named_parameters(recurse=False):
                    if _is_linear_map(name, parameter):
                        linear_maps.add(parameter)
        return {name for name, parameter in self.trainable().items() if parameter in linear_maps}

    def merged(self, others: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's parameters with adapters merged; ``others`` replace parameters of
        the same name.
        """
        named: dict[str, Tensor] = {**self.by_name(), **others}
        if self.scaling is None:
            return iter(named.items())
        return merged(named, self.scaling, self.device)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Disable the adapters inside the ``with`` block. TypeError when there are none."""
        if self.scaling is None:
            raise TypeError(
                "there are no adapters to leave out: give the role's trainer a lora.rank"
            )
        return without_adapters(self)

    def reshard(self) -> None:
        """Free parameters that were gathered for passes without a backward. FSDP replaces this
        method.
        """

    def layers(self) -> list[nn.Module]:
        """Return the decoder's layers. ConfigError when it has no list of them, or several and
        none is called so.
        """
        decoder = decoder_of(self.model)
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            layers = only_list_of_layers(decoder)
        if layers is None:
            raise ConfigError(
                f"{type(self.model).__name__} has no layers to shard, compute again, compile or "
                "step by Muon one by one; take trainer.backend=torch and trainer.optimizer=adamw, "
                "without trainer.gradient_checkpointing"
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
    def find_row_layout(self, operators: Mapping[str, str] = REFERENCE) -> Trial:
        """Switch to the library of each operator, and to the first layout of rows in which the
        model gives the same logits as in plain passes over each of ``trial_rows``. Packed attention
        is tried first.

        Returns the layout, None where none gives them, and why each one before it was refused.
        """
        config = self.model.config
        rows = trial_rows(config.get_text_config(), self.inputs, placeholder_ids(config))
        decoder = decoder_of(self.model)
        self._plain_attention = decoder.config._attn_implementation
        decoder.set_attn_implementation(EAGER)  # transformers' sdpa leaves soft caps out
        routes = RecordedRoutes(self.modules())
        try:
            with routes.recorded(), self._replaced.recorded(self.model):
                plain = plain_outputs(self.model, rows, self.inputs, self.device)
                expected = torch.cat(list(plain))
        except torch.OutOfMemoryError:
            raise
        except _UNFIT as failure:
            return Trial(None, [f"its own passes fail there ({failure})"])
        operators = settle(operators, self.modules(), self.device)
        ligers = [operator for operator, library in operators.items() if library == LIGER]
        if ligers:
            use_liger(self.modules(), self.device, ligers)
        use_operators(self.modules(), operators)
        chosen = self._attention = operators["attention"]
        if self.autocast and chosen in (AUTO, FLASH, FLEX):
            # logits are compared in float32, which FlashAttention does not take, and for which
            # FlexAttention would be compiled, half a minute, and used no more
            self._attention = TORCH
        (batch,) = micro_batches(rows, budget=len(rows.tokens), inputs=self.inputs)
        tolerance = rounding(expected.abs().max().item(), expected.dtype)
        failures: list[str] = []
        layouts = [RowLayout.packed] if self._packed_alone else list(RowLayout)
        for layout in layouts:
            try:
                self._use_layout(layout, batch)
                error = self._error(batch, expected, routes)
                if error <= tolerance:
                    self._compute_as_ever_after(batch, chosen)
                    return Trial(layout, failures)
                failures.append(f"logits are off by {error:.2g}")
            except torch.OutOfMemoryError:
                raise
            except _UNFIT as failure:
                failures.append(str(failure))
        return Trial(None, failures)

    def _compute_as_ever_after(self, batch: MicroBatch, attention: str) -> None:
        """Switch to the library ``attention``, and compute once in the type of all passes, so that
        its kernel is chosen, refused or compiled as the network is built.
        """
        if self._attention != attention:
            self._attention = attention
            with accelerator.autocast(self.device, enabled=self.autocast):
                self._hidden(batch)

    def _use_layout(self, layout: RowLayout, batch: MicroBatch) -> None:
        """Prepare the model for a layout; ``batch`` is for a pass in which packed attention
        finds out its windows.
        """
        decoder = decoder_of(self.model)
        self.layout = layout
        if layout is not RowLayout.packed:
            self._current.packing = None
            decoder.set_attn_implementation(self._plain_attention)
            return
        self._current.share_with(decoder.modules())
        self.mixers = separate_rows_in_mixers(decoder.modules(), self._current)
        decoder.set_attn_implementation(PACKED_PROBE)
        if decoder.config._attn_implementation != PACKED_PROBE:  # transformers only logs it
            raise NotImplementedError("its attention cannot be replaced")
        self._hidden(batch)
        decoder.set_attn_implementation(PACKED)

    def _error(self, batch: MicroBatch, expected: Tensor, routes: RecordedRoutes) -> float:
        """Return the largest error of the logits, or of the hidden states of a model without a
        head. NaN is inf. Packed tokens go to the experts of ``routes``, those of whole rows.
        """
        if self.layout is RowLayout.packed:
            order = torch.arange(batch.input_ids.shape[-1])
            if batch.shared is not None:
                order = batch.shared.first
            with routes.repeated(order):
                hidden = self._hidden(batch)
        else:
            hidden = self._hidden(batch)
        hidden = hidden[batch.predicting.to(self.device)]
        head = self.model.get_output_embeddings()
        found = hidden if head is None else self._head_output.logits(head(hidden))
        error = (found - expected).abs().max().item()
        if math.isnan(error):
            return math.inf
        return error

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Compute last hidden states, [T, D]."""
        ids = batch.input_ids.to(self.device)
        if self.layout is not RowLayout.packed:
            if batch.shared is None:
                return separate_hidden_states(self.model, ids[0], batch.runs, self.layout)
            shared = batch.shared.to(self.device)
            of_whole_rows = separate_hidden_states(
                self.model, ids[0, shared.whole], batch.runs, self.layout
            )
            return of_whole_rows[shared.first]
        return self._packed_hidden(batch, ids)

    def _packed_hidden(self, batch: MicroBatch, ids: Tensor) -> Tensor:
        """Compute last hidden states, [T, D], in one pass over all rows. A mask or a cache would
        silently mix the rows (log-probs off by 0.5). DataError for a row that is too long for it.
        """
        longest = max((length for _, length in batch.runs), default=0)
        if self.longest_packed is not None and longest > self.longest_packed:
            raise DataError(
                f"a row has {longest} tokens, expected at most {self.longest_packed}: a token of "
                "this model sees as many of those before it, which an indexer chooses (index_topk, "
                "or index_topk_blocks), and log-probs of longer rows are not those of transformers"
            )
        device = self.device
        ids = self._replaced.applied(ids)
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.inputs is not None:
            inputs = decoder_inputs(self.model, ids, batch.images, self.inputs, always=self._always)
        ranks = None
        if batch.route is not None:
            ranks = batch.route.ranks
        shared = None
        if batch.shared is not None:
            shared = batch.shared.to(device)
        routes = None
        if batch.routes is not None:
            routes = batch.routes.to(device, torch.int64)
        self._current.packing = Packing(
            batch.runs,
            ranks,
            ends_for_kernels(batch.runs, device),
            shared=shared,
            library=self._attention,
            routes=routes,
        )
        output = decoder_of(self.model)(
            **inputs,
            position_ids=batch.position_ids.to(device),
            attention_mask=None,
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _is_linear_map(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of a module is a weight [out, in], or a stack [n, out, in]."""
    if parameter.ndim == 2 and name != "weight":
        return False
    if parameter.ndim not in (2, 3):
        return False
    return min(parameter.shape[-2:]) > 1


@torch.no_grad()
def _begin(name: str, parameter: nn.Parameter) -> None:
    if not parameter.is_meta:
        parameter.copy_(first_values(name, parameter.shape))
