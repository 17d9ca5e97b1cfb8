"""A stage's parameters by Hugging Face names: read from files, gathered one at a time, and as a
state to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from siirl_dask.errors import ConfigError
from siirl_dask.models.weight_files import open_weights
from siirl_dask.training.megatron.families import LayerSizes
from siirl_dask.training.megatron.grid import RankGrid
from siirl_dask.training.megatron.model import PipelineStage
from siirl_dask.training.megatron.names import HEAD, ParameterPlace, layer_of, piece_of, place_of
from siirl_dask.training.parallel.dtensor import local

Shapes = Mapping[str, tuple[int, ...]]
VALUES = "value_head."
_TIED = "model.embed_tokens.weight"


class StageWeights:
    """The float32 parameters of a stage, and what a replica has under Hugging Face names.

    A method's ``held`` are tensors by megatron-core's names, shaped like the parameters: these, or
    moments of some.
    """

    def __init__(
        self,
        stage: PipelineStage,
        sizes: LayerSizes,
        grid: RankGrid,
        shapes: Shapes,
        *,
        learns: bool,
    ) -> None:
        """``shapes`` are those of all the model's parameters by name, in its order. A stage that
        computes in a narrower type learns in float32 copies of its parameters (``learns``).
        """
        self._stage = stage
        self._sizes = sizes
        self._grid = grid
        self._shapes = shapes
        self._per_chunk = sizes.layers // (grid.pipeline * grid.chunks)
        # tokens of the vocabulary
        self._scores = not any(name.startswith(VALUES) for name in shapes)
        self.places = {name: self._place(name) for name in shapes if self._is_here(name)}
        """Where each Hugging Face parameter of this stage lies."""
        of_experts = {place.parameter for place in self.places.values() if place.of_experts}
        in_order = sorted(stage.named_parameters(), key=lambda named: named[0] in of_experts)
        self.parameters = {name: _in_float32(each, learns) for name, each in in_order}
        """Parameters that learn, by megatron-core's names: those of experts last."""
        self.experts = sum(name in of_experts for name in self.parameters)
        """Number of parameters of experts."""

    @property
    def shared_at_ends(self) -> str | None:
        """Name of this stage's copy of embeddings that first and last stage share; None where it
        has none.
        """
        if not (self._sizes.tied and self._scores) or self._grid.pipeline == 1:
            return None
        if self._grid.first or self._grid.last:
            return self.places[_TIED].parameter
        return None

    @torch.no_grad()
    def read(self, path: str, renamed: Mapping[str, str], progress: Callable[[], None]) -> None:
        """Read this rank's part of each parameter from the folder's files. ``renamed`` are names by
        those in the files. Value heads begin at 0. ConfigError, by name, for a parameter that the
        files lack or have in another shape.
        """
        subject = f"model.path={path!r}"
        files = {
            renamed[name]: (name, file)
            for name, file in open_weights(path).items()
            if name in renamed
        }
        if _TIED not in files and self._sizes.tied and HEAD in files:
            files[_TIED] = files[HEAD]
        heads = {name for name in self.places if name.startswith(VALUES)}
        missing = sorted(self.places.keys() - files.keys() - heads)
        if missing:
            raise ConfigError(
                f"{subject}: its *.safetensors lack {missing}; trainer.backend=torch may know them "
                "by others"
            )
        for name, place in self.places.items():
            target = piece_of(self.parameters[place.parameter].detach(), place, self._sizes)
            if name in heads:
                target.zero_()
                continue
            stored, file = files[name]
            reader = file.get_slice(stored)
            if list(shape := self._shapes[name]) != reader.get_shape():
                raise ConfigError(
                    f"{subject}: {stored} has shape {reader.get_shape()}; expected {list(shape)}"
                )
            target.copy_(torch.as_tensor(reader[self._own(name, place)]).reshape(target.shape))
            progress()
        self.to_stage()

    @torch.no_grad()
    def to_stage(self) -> None:
        """Give the stage the values of its float32 parameters, where it computes with copies of
        them.
        """
        for name, parameter in self._stage.named_parameters():
            if parameter is not self.parameters[name]:
                parameter.copy_(self.parameters[name])

    def full(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the model in full, one at a time. All ranks of the replica must
        iterate to the end.

        The stage that has it joins the parts of its ranks, and gives it to the others.
        """
        grid = self._grid
        for name, shape in self._shapes.items():
            owner = self._stage_of(name)
            if grid.stage == owner:
                whole = self._joined(self._part(held, name).to(dtype), self.places[name])
            else:
                whole = torch.empty(shape, dtype=dtype, device=self._stage.device)
            if grid.pipeline > 1:
                dist.broadcast(whole, dist.get_global_rank(grid.pp, owner), group=grid.pp)
            yield name, whole

    def sharded(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts by Hugging Face names, as DTensors where other ranks have the
        rest.

        What lies joined with others, such as queries, keys and values, may be a copy in the host's
        memory: whoever loads into it calls ``put``. All others are live.
        """
        here = [name for name, place in self.places.items() if place.parameter in held]
        return {name: self._as_sharded(name, self._part(held, name)) for name in here}

    @torch.no_grad()
    def put(self, held: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copy the parts in ``state``, which ``sharded`` returned, into ``held``."""
        for name, part in ((name, local(each)) for name, each in state.items()):
            place = self.places[name]
            target = piece_of(held[place.parameter].detach(), place, self._sizes)
            if target.data_ptr() != part.data_ptr() or not target.is_contiguous():
                target.copy_(part.reshape(target.shape))

    def is_shared(self, parameter: str) -> bool:
        """Return whether each rank of a stage has a part of megatron-core's ``parameter``, and
        not all of it.
        """
        return any(
            place.split is not None
            for place in self.places.values()
            if place.parameter == parameter
        )

    def _stage_of(self, name: str) -> int:
        layer = layer_of(name)
        if layer is not None:
            return layer // self._per_chunk % self._grid.pipeline
        if name == _TIED:
            return 0
        return self._grid.pipeline - 1

    def _is_here(self, name: str) -> bool:
        """Return whether this stage has a parameter: tied embeddings are also on the last one,
        where the head is.
        """
        if self._stage_of(name) == self._grid.stage:
            return True
        if name != _TIED or not self._sizes.tied or not self._grid.last:
            return False
        return self._scores

    def _place(self, name: str) -> ParameterPlace:
        layer = layer_of(name)
        last = self._grid.chunks - 1
        if layer is not None:
            chunk, within = divmod(layer, self._per_chunk * self._grid.pipeline)
            return place_of(name, chunk, within % self._per_chunk)
        if name == _TIED and not self._grid.first:
            return place_of(HEAD, last)
        return place_of(name, 0 if name == _TIED else last)

    def _own(self, name: str, place: ParameterPlace) -> tuple[slice, ...]:
        """Return which part of a full parameter is this rank's."""
        shape = self._shapes[name]
        grid = self._grid
        own = [slice(0, size) for size in shape]
        if place.split is not None:
            at, parts = (
                (grid.of_experts, grid.experts) if place.of_experts else (grid.part, grid.tensor)
            )
            size = shape[place.split] // parts
            own[place.split] = slice(at * size, (at + 1) * size)
        return tuple(own)

    def _part(self, held: Mapping[str, Tensor], name: str) -> Tensor:
        """Return this rank's part of a parameter, in the shape that it has in the full one; live
        where that can be.
        """
        place = self.places[name]
        shape = [each.stop - each.start for each in self._own(name, place)]
        return piece_of(held[place.parameter].detach(), place, self._sizes).reshape(shape)

    def _joined(self, part: Tensor, place: ParameterPlace) -> Tensor:
        group = self._grid.ep if place.of_experts else self._grid.tp
        if place.split is None or group.size() == 1:
            return part.contiguous()
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for _ in range(group.size())
        ]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=place.split)

    def _as_sharded(self, name: str, part: Tensor) -> Tensor:
        mesh = self._grid.expert_mesh if self.places[name].of_experts else self._grid.mesh
        if mesh is None:
            return part
        # DCP takes no DTensor that begins within other memory
        if part.untyped_storage().nbytes() != part.nbytes:
            part = part.to("cpu", copy=True)
        shape = torch.Size(self._shapes[name])
        split = self.places[name].split
        layout = Replicate() if split is None else Shard(split)
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), part.dtype)
        return DTensor(part, DTensorSpec(mesh, (layout,), tensor_meta=meta), requires_grad=False)


def _in_float32(parameter: nn.Parameter, learns: bool) -> nn.Parameter:
    """Return the parameter itself if it is float32 or does not learn; else a copy to which its
    gradients go.
    """
    if not learns or parameter.dtype == torch.float32:
        return parameter
    copy = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32))
    parameter.register_post_accumulate_grad_hook(partial(_move_gradient, copy))
    return copy


def _move_gradient(copy: nn.Parameter, parameter: Tensor) -> None:
    assert copy.grad is not None
    assert parameter.grad is not None
    copy.grad.add_(parameter.grad)
    parameter.grad = None
