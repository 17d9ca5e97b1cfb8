"""A replica of a model over its ranks: builds this rank's stage, and runs micro-batches through
all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, PreTrainedModel

from siirl_dask.algorithms import TokenLoss
from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.models.architecture import read_config
from siirl_dask.models.loading import class_of_config, refused_by_name
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.weight_files import open_weights
from siirl_dask.models.weight_names import parameter_names
from siirl_dask.training.layouts import operators_of
from siirl_dask.training.learner import Passes, See, Weighing
from siirl_dask.training.megatron.core import on_device, quietly
from siirl_dask.training.megatron.families import check_division, sizes_of
from siirl_dask.training.megatron.grid import RankGrid
from siirl_dask.training.megatron.messages import StageMessages
from siirl_dask.training.megatron.model import Chunk, PipelineStage
from siirl_dask.training.megatron.rows import joined_rows
from siirl_dask.training.megatron.scores import shared_logprobs, shared_tokens
from siirl_dask.training.megatron.weights import StageWeights
from siirl_dask.training.model.layers import recompute
from siirl_dask.training.model.operators import say
from siirl_dask.training.packing import MicroBatch, idle_batch, micro_batches
from siirl_dask.training.trainer import Batch, PackedRows, TokenScores

B = TypeVar("B", bound=Batch)
Evaluate = Callable[[B, MicroBatch, Sequence[Tensor]], tuple[TokenLoss, Tensor]]
"""Function of a batch, one of its micro-batches and its scores [K] each: losses [S] and row
offsets [R + 1]."""


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that a replica is built from."""

    model: ModelConfig
    trainer: TrainerConfig
    device: str
    rank: Rank
    progress: Callable[[], None] = lambda: None
    """Called for each micro-batch."""


class Replica:
    """The model over this rank's replica. Every rank of it makes the same calls, with rows of
    its own.
    """

    def __init__(self, built: Built, *, learns: bool, temperature: float | None) -> None:
        """It scores ``TokenScores`` at ``temperature``, or with None values. ConfigError for a
        model that is not known.
        """
        self.device = torch.device(built.device)
        self._float32_head = built.model.float32_head
        path = built.model.path
        megatron = built.trainer.megatron
        sizes = sizes_of(read_config(path) or {}, path)
        check_division(megatron, sizes, path)
        self.grid = RankGrid(built.rank, megatron, self.device)
        self._temperature = temperature
        self._trainer = built.trainer
        self._progress = built.progress
        self._count = 1
        if temperature is not None:
            self._count = len(fields(TokenScores))
        self.dtype = torch_dtype(built.model.dtype, self.device)
        operators = operators_of(built.trainer, self.device.type)
        say(operators)
        meta = _meta_model(path)
        padding = cast(nn.Embedding, meta.get_input_embeddings()).padding_idx
        with on_device(self.device), quietly():
            self.stage = PipelineStage(
                sizes,
                self.grid,
                self.device,
                self.dtype,
                operators,
                head=temperature is not None,
                padding=padding,
            )
        shapes = {name: tuple(each.shape) for name, each in meta.named_parameters()}
        if temperature is None:
            shapes = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
            shapes |= {"value_head.weight": (1, sizes.hidden), "value_head.bias": (1,)}
            if self.grid.last:  # float32, as small as it is
                self.stage.value_head = nn.Linear(sizes.hidden, 1, device=self.device)
        self.stage.requires_grad_(learns)
        self.weights = StageWeights(self.stage, sizes, self.grid, shapes, learns=learns)
        self.weights.read(path, parameter_names(meta, open_weights(path)), built.progress)
        if built.trainer.gradient_checkpointing:
            recompute(self.stage.layers())
        several = None
        if self.grid.chunks > 1:
            several = self.grid.chunks
        self._schedule = get_forward_backward_func(pp_size=self.grid.pipeline, vp_size=several)

    @torch.no_grad()
    def score(self, rows: PackedRows) -> list[Tensor]:
        """Return the ``TokenScores`` of this rank's response tokens, or their values. [K]
        float32 each, on the CPU.
        """
        joined, own = joined_rows(rows, self.grid)
        parts = self._parts(joined)
        scores: list[Tensor] = [torch.empty(0, device=self.device)] * self._count
        if parts:
            found = self._run(
                self._enough(parts, joined),
                lambda part, hidden: (hidden.new_zeros(()), self._scores(part, hidden)),
            )
            scores = [torch.cat(each) for each in zip(*found, strict=True)]
        if self.grid.pipeline > 1:
            total = sum(len(part.targets) for part in parts)
            all_scores = torch.empty(self._count, total, device=self.device)
            if self.grid.last:
                all_scores = torch.stack(scores)
            source = dist.get_global_rank(self.grid.pp, self.grid.pipeline - 1)
            dist.broadcast(all_scores, source, group=self.grid.pp)
            scores = list(all_scores)
        return [each[own].cpu() for each in scores]

    def passes(self, evaluate: Evaluate[B]) -> Passes[B]:
        """Return the forward and backward passes of batches of the whole replica (1F1B); see
        ``Learner.update``.

        Losses are evaluated on the last stage, whose ranks all have the same scores. To be seen one
        by one, micro-batches go through the stages one by one.
        """

        def passes(batch: B, weigh: Weighing, see: See | None) -> None:
            parts = self._parts(batch.rows)
            if not parts:
                if self.grid.last:
                    none = [torch.empty(0, device=self.device)] * self._count
                    weigh(*evaluate(batch, idle_batch(batch.rows), none))
                return
            newest: list[tuple[TokenLoss, Tensor]] = []

            def loss(part: MicroBatch, hidden: Tensor) -> tuple[Tensor, None]:
                newest[:] = [evaluate(batch, part, self._scores(part, hidden))]
                return weigh(*newest[0]), None

            batches = [parts] if see is None else [[part] for part in parts]
            for together in batches:
                self._run(self._enough(together, batch.rows), loss, backward=True)
                if see is not None and self.grid.last:
                    see(*newest[0])

        return passes

    def _parts(self, rows: PackedRows) -> list[MicroBatch]:
        """Cut the replica's rows into micro-batches; none without rows. Linked replicas take part
        in each pass, so that one with fewer gets idle ones as well.
        """
        # max_tokens_per_micro_batch is the budget of one rank of the context
        budget = self._trainer.max_tokens_per_micro_batch * self.grid.context
        parts: list[MicroBatch] = []
        if rows.tokens.numel():
            parts = micro_batches(rows, budget)
        if self.grid.linked == 1:
            return parts
        most = max(self.grid.gather_linked(len(parts)))
        return parts + [idle_batch(rows)] * (most - len(parts))

    def _enough(self, parts: list[MicroBatch], rows: PackedRows) -> list[MicroBatch]:
        """Return the micro-batches after as many idle ones as an interleaved schedule wants: it
        takes multiples of the stages, and waits for ever for what nobody sends if it has no more
        than one for each.
        """
        if self.grid.chunks == 1:
            return parts
        stages = self.grid.pipeline
        most = max(2 * stages, -(-len(parts) // stages) * stages)
        return [idle_batch(rows)] * (most - len(parts)) + parts

    def _run(
        self,
        parts: Sequence[MicroBatch],
        loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Any]],
        *,
        backward: bool = False,
    ) -> list[Any]:
        """Run micro-batches through the stages. Returns, on the last one, what ``loss`` gives
        besides the loss.
        """
        grid = self.grid
        chunks = list(self.stage.chunks)
        no_tokens = torch.zeros((), dtype=torch.int)

        def finish(part: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, found = loss(part, hidden)
            return value, no_tokens, found

        def step(waiting: Any, chunk: Chunk) -> tuple[Tensor, Any]:
            part = next(waiting)
            self._progress()
            return chunk(part), partial(finish, part)

        talking = {}
        if grid.pipeline > 1:
            talking["p2p_communicator"] = StageMessages(
                grid.pp, grid.pp_cpu, self.stage.config, self.device
            )
        with on_device(self.device):
            found: list[Any] = self._schedule(
                forward_step_func=step,
                data_iterator=[iter(parts) for _ in chunks],
                model=chunks,
                num_microbatches=len(parts),
                seq_length=1,  # micro-batches tell their own lengths
                micro_batch_size=1,
                forward_only=not backward,
                pg_collection=self.stage.pg_collection,
                **talking,
            )
        return found

    def _scores(self, part: MicroBatch, hidden: Tensor) -> list[Tensor]:
        """Score response tokens from the last hidden states, of which each rank has those of its
        tokens. [T, 1, D] -> [K] each.
        """
        at, targets = (each.to(self.device) for each in (part.predicting, part.targets))
        if self.grid.context == 1:
            return self._scores_of(hidden[:, 0][at], targets)
        at = at - self.grid.of_tokens * len(hidden)
        here = (at >= 0) & (at < len(hidden))
        own_scores = self._scores_of(hidden[:, 0][at[here]], targets[here])
        return shared_tokens(own_scores, here, self.grid.cp)

    def _scores_of(self, predicting: Tensor, targets: Tensor) -> list[Tensor]:
        """Score tokens from the states that predict them. [C, D], [C] -> [C] each."""
        if self._temperature is None:
            head = self.stage.value_head
            assert head is not None
            return [linear(predicting.float(), head.weight, head.bias).squeeze(-1)]
        scores = shared_logprobs(
            predicting,
            self.stage.output_layer.weight,
            targets,
            temperature=self._temperature,
            float32=self._float32_head,
            group=self.grid.tp,
        )
        return list(scores)


def _meta_model(path: str) -> PreTrainedModel:
    """Build the Hugging Face model without memory, for the names and shapes of its parameters."""
    with refused_by_name(path, f"model.path={path!r}"), torch.device("meta"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return class_of_config(config).from_config(config, dtype=torch.float32)  # type: ignore[no-any-return]
