"""A pipeline stage of a decoder, of megatron-core's layers with the project's attention over packed
rows.

A stage is a run of layers, or several of which each continues where the last stage's one before
ended (``virtual_pipeline``): a ``Chunk`` each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from siirl_dask.devices.operators import MINDSPEED
from siirl_dask.training.megatron.attention import CoreRows, PackedCoreAttention
from siirl_dask.training.megatron.core import share_buffer
from siirl_dask.training.megatron.experts import Experts
from siirl_dask.training.megatron.families import LayerSizes
from siirl_dask.training.megatron.grid import RankGrid
from siirl_dask.training.megatron.mindspeed import options_of
from siirl_dask.training.megatron.mindspeed_attention import MindSpeedCoreAttention
from siirl_dask.training.model.attention import ends_for_kernels
from siirl_dask.training.packing import MicroBatch, Packing


class PipelineStage(nn.Module):
    """The chunks of this rank's stage."""

    def __init__(
        self,
        sizes: LayerSizes,
        grid: RankGrid,
        device: torch.device,
        dtype: torch.dtype,
        operators: Mapping[str, str],
        *,
        head: bool,
        padding: int | None,
    ) -> None:
        """``operators`` are the libraries of fused operators. Parameters are without values.
        Without ``head`` the last stage has no output layer, but what is then given as
        ``value_head``. ``padding`` is the token whose embedding learns nothing, if there is one.
        """
        super().__init__()
        if grid.split_tokens:
            share_buffer()
        # one that forks nothing: there is no dropout
        initialize_rng_tracker(inference_rng_tracker=True)
        self.config = transformer_config(sizes, grid, device, dtype, operators)
        self.pg_collection = grid.collection()
        self.chunks = nn.ModuleList(
            Chunk(
                self,
                sizes,
                grid=grid,
                device=device,
                dtype=dtype,
                operators=operators,
                number=number,
                head=head,
                padding=padding,
            )
            for number in range(grid.chunks)
        )
        self.value_head: nn.Linear | None = None
        self.device = device

    @property
    def output_layer(self) -> Any:
        """The head, which the last stage's last chunk has."""
        return self.chunks[-1].output_layer

    def layers(self) -> list[nn.Module]:
        """Return the layers of this stage."""
        return [layer for chunk in self.chunks for layer in chunk.decoder.layers]  # type: ignore[union-attr]


class Chunk(GPTModel):  # type: ignore[misc]  # megatron-core may not be here to say its types
    """A run of layers, with the embeddings on the model's first one and norm and head on the last.

    ``forward`` gives hidden states; those of the last chunk are normalised and not multiplied with
    the head.
    """

    def __init__(
        self,
        stage: PipelineStage,
        sizes: LayerSizes,
        grid: RankGrid,
        device: torch.device,
        dtype: torch.dtype,
        operators: Mapping[str, str],
        number: int,
        *,
        head: bool,
        padding: int | None,
    ) -> None:
        """``number`` is that of the chunk in its ``stage``; for the others see there."""
        count = sizes.layers // (grid.pipeline * grid.chunks)
        first = (number * grid.pipeline + grid.stage) * count
        mixed = [sizes.has_experts(first + layer) for layer in range(count)]
        is_first = False
        if number == 0:
            is_first = grid.first
        is_last = False
        if number == grid.chunks - 1:
            is_last = grid.last
        super().__init__(
            stage.config,
            _layers(sizes, operators, mixed),
            vocab_size=sizes.vocabulary,
            max_sequence_length=0,
            pre_process=is_first,
            post_process=is_last,
            position_embedding_type="none",
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            pg_collection=stage.pg_collection,
            vp_stage=number if grid.chunks > 1 else None,
        )
        if is_last and not head:
            del self.output_layer
        elif is_last and is_first and sizes.tied:
            self.output_layer.weight = self.embedding.word_embeddings.weight
        before = sum(map(sizes.has_experts, range(first)))
        for place, layer in enumerate(compress(self.decoder.layers, mixed), before):
            assert sizes.mixture is not None
            layer.mlp = Experts(sizes.mixture, sizes.hidden, grid, device, dtype)
            layer.forward = partial(_with_routes, layer.forward, layer.mlp, place)
        if operators["rms_norm"] == MINDSPEED:
            for parameter in self.decoder.parameters():
                # the kernel takes a weight of the hidden states' type alone
                if parameter.ndim == 1:
                    parameter.data = parameter.data.to(dtype)
        self.to(device)
        self.device = device
        self._grid = grid
        self._padding = padding
        self._attention = operators["attention"]
        exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.int64).float() / sizes.head_dim
        self._frequencies = (1.0 / sizes.rope_base**exponents).to(device)

    def forward(self, part: MicroBatch) -> Tensor:
        """Return the hidden states after these layers, [T, 1, D]. Where ranks share the tokens of a
        micro-batch (``context``) they are those of this rank's part, filled up to be as long as the
        others, and where they split tokens between attention and MLP, before the last chunk of a
        part of that.
        """
        ids, positions = (self._own_tokens(each) for each in (part.input_ids, part.position_ids))
        embedded = None
        if self.pre_process:
            embedded = self._embed(ids.to(self.device))
        packing = Packing(
            part.runs,
            ends=ends_for_kernels(part.runs, self.device),
            library=self._attention,
            shared=None if part.shared is None else part.shared.to(self.device),
        )
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=CoreRows(
                packing, part.position_ids.shape[1], self._grid.of_context, self._routes(part)
            ),
            rotary_pos_emb=self._angles(positions),
        )
        # every rank scores all of them, and has each one's gradient
        if self._grid.split_tokens and self.post_process:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._grid.tp
            )
        return hidden

    def _own_tokens(self, values: Tensor, fill: int = 0) -> Tensor:
        """Return this rank's part of a micro-batch's tokens, filled up so that all parts are
        equal. [n, T] -> [n, N]
        """
        grid = self._grid
        parts = grid.context * (grid.tensor if grid.split_tokens else 1)
        filled = pad(values, (0, -values.shape[1] % parts), value=fill)
        return filled.chunk(grid.context, dim=1)[grid.of_tokens]

    def _routes(self, part: MicroBatch) -> Tensor | None:
        """Return the routes of the tokens that this rank has between attention and MLP, [N, W]."""
        if part.routes is None:
            return None
        routes = self._own_tokens(part.routes.T, -1).T
        if self._grid.split_tokens:
            routes = routes.chunk(self._grid.tensor)[self._grid.part]
        return routes.to(self.device, torch.int64)

    def _embed(self, ids: Tensor) -> Tensor:
        """Embed tokens. [1, T] -> [T, 1, D], or this rank's part of it."""
        embedded: Tensor = self.embedding(input_ids=ids, position_ids=None)
        if self._padding is None:
            return embedded
        if self._grid.split_tokens:
            ids = ids.chunk(self._grid.tensor, dim=1)[self._grid.part]
        # as in transformers, whose embedding of padding learns nothing
        return torch.where((ids == self._padding).T[..., None], embedded.detach(), embedded)

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angles of rotary embeddings, [T, 1, 1, head_dim] float32. Positions are [1,
        T].
        """
        angles = positions[0].to(self.device).float()[:, None] * self._frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None]


def _with_routes(
    forward: Callable[..., Any], experts: Experts, place: int, *args: Any, **given: Any
) -> Any:
    """Run a layer whose tokens go by its rows' routes; ``place`` is its own among layers that
    have experts.
    """
    rows: CoreRows = given["attention_mask"]
    experts.go_by(rows.routes, place)
    try:
        return forward(*args, **given)
    finally:
        experts.go_by(None, place)


class Norm(nn.RMSNorm):
    """The norm of layers and heads. megatron-core's own refuses parts of the tokens, which it
    would norm alike.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


def _layers(
    sizes: LayerSizes, operators: Mapping[str, str], mixed: Sequence[bool]
) -> TransformerBlockSubmodules:
    """Return a chunk's layers, those that are ``mixed`` with nothing where their experts go:
    megatron-core builds none but its own from a description.
    """
    spec = get_gpt_layer_local_spec(qk_layernorm=sizes.normed_heads, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = (
        MindSpeedCoreAttention if operators["attention"] == MINDSPEED else PackedCoreAttention
    )
    # it has replaced that one
    norm = Norm
    if operators["rms_norm"] == MINDSPEED:
        norm = spec.submodules.input_layernorm
    if sizes.normed_heads:
        attention.q_layernorm = attention.k_layernorm = norm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    without_mlp = replace(spec, submodules=replace(spec.submodules, mlp=IdentityOp))
    return TransformerBlockSubmodules([without_mlp if each else spec for each in mixed], norm)


def transformer_config(
    sizes: LayerSizes,
    grid: RankGrid,
    device: torch.device,
    dtype: torch.dtype,
    operators: Mapping[str, str],
) -> TransformerConfig:
    """Return megatron-core's description of the decoder. Kernels of other libraries than
    ``operators`` says are off.
    """
    on_cpu = device.type == "cpu"
    fusions = (
        "masked_softmax_fusion", "gradient_accumulation_fusion", "bias_dropout_fusion", "apply_rope_fusion",
    )  # fmt: skip
    options: dict[str, Any] = dict.fromkeys(fusions, False)
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.intermediate,
        layernorm_epsilon=sizes.epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=sizes.qkv_bias,
        qk_layernorm=sizes.normed_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.tensor,
        sequence_parallel=grid.split_tokens,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=grid.chunks if grid.chunks > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,  # weights are read, each rank its own part
        variable_seq_lengths=True,
        # experts are not its own, but the default takes no variable lengths
        moe_token_dispatcher_type="alltoall",
        # of two stages each sends the other both kinds of messages, which a batch would mix up
        batch_p2p_comm=not on_cpu and grid.chunks == 1,
        overlap_p2p_comm=not on_cpu and grid.chunks > 1,
        # or schedules would divide the loss by the number of micro-batches
        calculate_per_token_loss=True,
        bias_activation_fusion=operators["swiglu"]
        == MINDSPEED,  # through the function that MindSpeed replaces
        **options,
    )
    for name, value in (options_of(operators) or {}).items():
        setattr(config, name, value)  # where MindSpeed's functions look for them
    return config
