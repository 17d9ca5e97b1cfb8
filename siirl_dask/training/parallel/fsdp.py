"""A model sharded over the ranks of a role: FSDP2 (arXiv:2304.11277, torch's ``fully_shard``).

The model is built on the meta device and sharded, and each rank reads its shards from the folder:
no rank ever holds the full model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedModel

from siirl_dask.config import ImagesConfig, ModelConfig, TrainerConfig, parse_bytes
from siirl_dask.context import Rank
from siirl_dask.devices import accelerator
from siirl_dask.errors import ConfigError
from siirl_dask.models.loading import class_of_config, correct_modules, refused_by_name
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.rotary import pin_frequencies
from siirl_dask.models.weight_files import check_tied, open_weights
from siirl_dask.models.weight_names import stored_parameters
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.files.safetensors import load_adapters, load_safetensors
from siirl_dask.training.layouts import check_heads, operators_of
from siirl_dask.training.model.layers import compile_layers, recompute
from siirl_dask.training.model.network import Network
from siirl_dask.training.model.row_layout import RowLayout
from siirl_dask.training.model.trial import use_row_layout
from siirl_dask.training.packing import MicroBatch, idle_batch, micro_batches
from siirl_dask.training.parallel.backend import Make, N
from siirl_dask.training.parallel.mesh import role_mesh, sequence_ranks, tensor_mesh
from siirl_dask.training.parallel.sequence_parallel import idle_tokens, shared_batches
from siirl_dask.training.parallel.tensor_parallel import common_batches, split_layers
from siirl_dask.training.parts import check_no_split_images
from siirl_dask.training.trainer import PackedRows


class FsdpBackend:
    """A ModelBackend with FSDP2, and optionally sequence or tensor parallelism.

    Parameters, gradients and moments are float32. With ``model.dtype`` bfloat16 a layer is gathered
    and computed in bfloat16, and gradients are summed in float32.
    """

    holds_groups = True

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        *,
        device: str,
        rank: Rank,
        images: ImagesConfig | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``progress`` is called for each micro-batch."""
        self.device = torch.device(device)
        self._progress = progress
        self._model = model
        self._trainer = trainer
        self._rank = rank
        self._images = images
        check_heads(trainer, model.path)
        check_no_split_images(trainer, images)
        self._sequence = sequence_ranks(rank, trainer.fsdp.sequence_parallel, self.device)
        size = trainer.fsdp.tensor_parallel
        if size > 1:
            mesh = tensor_mesh(rank, size, self.device)
            assert mesh.mesh_dim_names is not None
            self._mesh, self._tensor = (mesh[axis] for axis in mesh.mesh_dim_names)
            self._tensor_ranks = Rank(rank.rank % size, size, self._tensor.get_group())
        else:
            self._mesh = role_mesh(rank, trainer.fsdp.shard_size, self.device)
            self._tensor_ranks = Rank()
        shards = rank.size
        if size == 1 and trainer.fsdp.shard_size is not None:
            shards = trainer.fsdp.shard_size
        first = rank.rank - rank.rank % shards
        self.shard_ranks: Sequence[int] | None = range(first, first + shards)

    def network(self, make: Make[N]) -> N:
        model = _meta_model(self._model.path)
        pin_frequencies(model, self._model.longest_row, f"model.path={self._model.path!r}")
        check_tied(self._model.path, model)
        stored = stored_parameters(model, open_weights(self._model.path))
        inputs = ImageInputs.load(self._model.path, self._images, model)
        network = make(
            model,
            device=self.device,
            autocast=False,
            inputs=inputs,
            always=inputs is not None,
        )
        if self._tensor_ranks.size > 1:
            split_layers(network.model, self._tensor, self._model.path)
        if self._trainer.compile:
            compile_layers(network.layers())
        if self._trainer.gradient_checkpointing:
            recompute([*network.layers(), *network.tower_layers()])
        _check_buffers(network, self._model.path)
        buffers = {
            name: buffer.clone() for name, buffer in network.named_buffers(remove_duplicate=False)
        }
        self._shard(network)
        network.to_empty(device="cpu" if self._trainer.fsdp.offload else self.device)
        _restore_buffers(network, buffers, self.device)
        load_safetensors(network, self._model.path, stored, self._progress)
        load_adapters(network, self._trainer.lora)
        operators = operators_of(self._trainer, self.device.type)
        use_row_layout(network, self._model.path, operators, self._model.longest_row)
        self._check_whole_rows(network)
        network.reshard()
        network.register_forward_hook(lambda *_: self._progress())
        return network

    def micro_batches(self, rows: PackedRows, inputs: ImageInputs | None) -> list[MicroBatch]:
        """Cut rows into micro-batches. All ranks take part in each pass, so ranks with fewer get
        idle ones as well.
        """
        budget = self._trainer.max_tokens_per_micro_batch
        sequence = self._sequence
        tensor = self._tensor_ranks
        if sequence.size > 1:
            parts = shared_batches(rows, sequence, budget, self.device)
            idle = idle_tokens(rows, sequence)
        elif tensor.size > 1:
            parts = common_batches(rows, tensor, budget, self.device)
            idle = idle_batch(rows)
        else:
            parts = micro_batches(rows, budget, inputs=inputs)
            idle = idle_batch(rows)
        parts = [part for part in parts if part.input_ids.numel()]
        passes = torch.tensor(len(parts), device=self.device)
        if self._rank.group is not None:
            dist.all_reduce(passes, dist.ReduceOp.MAX, group=self._rank.group)
        return parts + [idle] * (max(1, int(passes)) - len(parts))

    def _check_whole_rows(self, network: Network) -> None:
        """Raise ConfigError where ranks are to divide rows or layers of a model that is not made
        for it.
        """
        if network.layout is not RowLayout.packed:
            reason = f"its rows are computed by themselves ({network.layout})"
        elif network.mixers:
            reason = "it has layers that carry a state along a row"
        else:
            return
        for name in ("sequence_parallel", "tensor_parallel"):
            size = getattr(self._trainer.fsdp, name)
            if size > 1:
                raise ConfigError(
                    f"trainer.fsdp.{name}={size}: {type(network.model).__name__} of "
                    f"{self._model.path!r} is not divided, since {reason}; leave it out"
                )

    def _shard(self, network: Network) -> None:
        bfloat16 = torch_dtype(self._model.dtype, self.device) is torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=accelerator.pins_host_memory(self.device))
        size = parse_bytes("trainer.fsdp.gather_size", self._trainer.fsdp.gather_size)
        units: list[list[nn.Module]] = [
            *_units(network.tower_layers(), size),
            *_units(network.layers(), size),
            [network],
        ]
        for unit in units:
            fully_shard(
                unit,
                mesh=self._mesh,
                mp_policy=policy if bfloat16 else MixedPrecisionPolicy(),
                offload_policy=offload if self._trainer.fsdp.offload else OffloadPolicy(),
            )
        for module in network.modules():
            # sum, not mean: the loss is divided by the tokens of all ranks
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(network, "find_row_layout")


def _units(layers: list[nn.Module], size: int) -> list[list[nn.Module]]:
    """Group neighbouring layers to gather together, at least ``size`` bytes each; the root
    gathers the rest.
    """
    units: list[list[nn.Module]] = []
    unit: list[nn.Module] = []
    for layer in layers:
        unit.append(layer)
        if sum(parameter.nbytes for each in unit for parameter in each.parameters()) >= size:
            units.append(unit)
            unit = []
    return units


def _meta_model(path: str) -> PreTrainedModel:
    """Build the model of the folder ``path``, its parameters on the meta device, without memory,
    and its buffers, which are small, on the CPU: their values follow from the config, and no file
    has most of them.
    """
    with refused_by_name(path, f"model.path={path!r}"), _EmptyOnMeta():
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model: PreTrainedModel = class_of_config(config).from_config(config, dtype=torch.float32)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    model.tie_weights()
    correct_modules(model)
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Has torch.empty, with which modules allocate parameters, give tensors without memory."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = {} if kwargs is None else kwargs
        if function is torch.empty:
            options = {**options, "device": "meta"}
        return function(*args, **options)


def _check_buffers(model: nn.Module, path: str) -> None:
    """Raise ConfigError for a buffer whose values are not known."""
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unknown:
        raise ConfigError(
            f"model.path={path!r}: the buffers {unknown} do not follow from the model's config; "
            "take trainer.backend=torch"
        )


def _restore_buffers(
    network: nn.Module, buffers: Mapping[str, Tensor], device: torch.device
) -> None:
    """Replace a network's buffers, which lost their values when its parameters got memory."""
    for name, module in network.named_modules():
        prefix = ""
        if name:
            prefix = f"{name}."
        for key in dict(module.named_buffers(recurse=False)):
            module._buffers[key] = buffers[prefix + key].to(device)
