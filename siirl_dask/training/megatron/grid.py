"""The grid of a role's ranks: replicas of the model, its pipeline stages, parts of the tokens, and
of each layer.

A replica has neighbouring ranks, stage after stage, and of each stage the ranks of one part of the
tokens after the other, of which those that share the stage's layers are neighbours. Experts are
spread over neighbours among all ranks that have the same stage, replica after replica, as in
megatron-core with an expert tensor parallelism of 1. All groups are subgroups of the role's; none
of megatron-core's global state is used.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from siirl_dask.collectives import all_gather_bytes, new_subgroup
from siirl_dask.config import MegatronConfig
from siirl_dask.context import Rank
from siirl_dask.training.megatron.families import check_ranks
from siirl_dask.training.parallel.mesh import even_out, group_of_one, one_axis

T = TypeVar("T")


class RankGrid:
    """This rank's place among the ranks of the role, and its groups. All ranks of the role must
    make one.
    """

    def __init__(self, rank: Rank, megatron: MegatronConfig, device: torch.device) -> None:
        """ConfigError when a replica, or the ranks that share experts, do not divide the role."""
        check_ranks(megatron, rank.size)
        if rank.size > 1 and rank.group is None:
            raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
        self.tensor = megatron.tensor_parallel
        self.pipeline = megatron.pipeline_parallel
        self.context = megatron.context_parallel
        self.role = rank
        self.ranks = megatron.ranks
        """This rank in the role, and the number of a replica's ranks."""
        self.chunks = megatron.virtual_pipeline
        """Runs of layers of a stage."""
        self.split_tokens = megatron.sequence_parallel
        """Whether the ranks that share a layer have a part of the tokens each between attention
        and MLP."""
        self.replica, self.in_replica = divmod(rank.rank, self.ranks)
        self.stage, self._in_stage = divmod(self.in_replica, self.context * self.tensor)
        self.of_tokens, self.part = divmod(self._in_stage, self.tensor)
        """This rank's place among those that share a micro-batch's tokens, and among those that
        share a layer."""
        self.first = self.stage == 0
        self.last = self.stage == self.pipeline - 1
        self.experts = megatron.experts_over
        self.linked = megatron.linked_replicas
        """Ranks over which experts are spread, and neighbouring replicas that they are of."""
        self._experts_row, self.of_experts = divmod(
            self.replica * self.context * self.tensor + self._in_stage, self.experts
        )
        """Which of such groups of ranks this rank is in, and its place there."""
        if rank.group is None:
            self._alone(device)
        else:
            self._groups(rank, device)

    @property
    def replicas(self) -> int:
        """Replicas of the model in the role."""
        return self.role.size // self.ranks

    @property
    def holders(self) -> int:
        """Ranks that hold the same part of the model, but for experts."""
        return self.replicas * self.context

    @property
    def scores_here(self) -> bool:
        """Whether this is the rank of its replica that speaks for what the last stage has
        computed.
        """
        if not self.last:
            return False
        return self._in_stage == 0

    def of_replicas(self) -> Rank:
        """Return this rank among those of all replicas that have the same place there."""
        return Rank(self.replica, self.replicas, self._dp, cpu_group=self._dp_cpu)

    @property
    def of_context(self) -> Rank | None:
        """This rank among those that share a micro-batch's tokens; None where each has all of
        them.
        """
        if self.context == 1:
            return None
        return Rank(self.of_tokens, self.context, self.cp)

    @property
    def counts_experts(self) -> bool:
        """Whether no rank before this one among the linked replicas has the same experts."""
        return self._in_stage < self.experts

    def collection(self) -> Any:
        """Return megatron-core's collection of process groups."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = {
            "tp": self.tp,
            "pp": self.pp,
            "mp": self.mp,
            "embd": self.ends,
            "tp_cp": self.tp,
            "tp_ep": self.tp,
        }
        # attention exchanges tokens itself: to megatron-core each rank's are a sequence of their
        # own
        alone = (
            "cp",
            "dp",
            "dp_cp",
            "ep",
            "expt_dp",
            "pos_embd",
            "expt_tp",
            "hcp",
            "tp_dp_cp",
            "intra_dp_cp",
        )
        return ProcessGroupCollection(**groups, tp_ep_pp=self.mp, **dict.fromkeys(alone, self.one))

    def gather(self, value: T) -> list[T]:
        """Return what each rank of the replica gives, in their order. All of them must call."""
        if self._replica_cpu is None or self.ranks == 1:
            return [value]
        return [
            pickle.loads(each) for each in all_gather_bytes(self._replica_cpu, pickle.dumps(value))
        ]

    def gather_linked(self, value: T) -> list[T]:
        """Return what each rank of the linked replicas gives, in their order. All of them must
        call.
        """
        if self.linked == 1:
            return self.gather(value)
        return [
            pickle.loads(each) for each in all_gather_bytes(self._linked_cpu, pickle.dumps(value))
        ]

    def from_scores(self, value: T) -> T:
        """Return what the rank with ``scores_here`` gives, on every rank of the replica. All of
        them must call.
        """
        return self.gather(value)[(self.pipeline - 1) * self.context * self.tensor]

    def _alone(self, device: torch.device) -> None:
        self.tp = self.cp = self.pp = self.mp = self.ends = self.one = group_of_one(device.type)
        self.ep = self.one
        self.held_by = self.edp = self._dp = self._dp_cpu = self._replica_cpu = self._linked_cpu = (
            None
        )
        self.pp_cpu = self.pp
        self.mesh: DeviceMesh | None = None
        self.expert_mesh: DeviceMesh | None = None

    def _groups(self, rank: Rank, device: torch.device) -> None:
        """Make each kind of group once, in one order, on every rank."""
        world = torch.tensor(dist.get_process_group_ranks(rank.group))
        ranks = world.view(self.replicas, self.pipeline, self.context, self.tensor)
        replica = ranks[self.replica]
        me = dist.get_rank()
        same_tokens = replica[:, self.of_tokens]
        same_place = ranks[:, self.stage, self.of_tokens, self.part].tolist()
        even_out(rank.group, device)
        self.one = new_subgroup([me], rank.group)
        self.tp = new_subgroup(same_tokens[self.stage].tolist(), rank.group)
        self.pp = new_subgroup(same_tokens[:, self.part].tolist(), rank.group)
        self.mp = new_subgroup(same_tokens.flatten().tolist(), rank.group)
        self._dp = self.held_by = new_subgroup(same_place, rank.group)
        """Group of the ranks that hold the same part of the model, but for experts."""
        self.cp = self.one
        if self.context > 1:
            self.cp = new_subgroup(replica[self.stage, :, self.part].tolist(), rank.group)
            self.held_by = new_subgroup(
                ranks[:, self.stage, :, self.part].flatten().tolist(), rank.group
            )
        ends = [me]
        if self.pipeline > 1 and (self.first or self.last):
            ends = same_tokens[[0, -1], self.part].tolist()
        self.ends = new_subgroup(ends, rank.group)
        """Group of the first and the last stage, which share tied embeddings."""
        shared = rank.cpu_group is rank.group
        self._dp_cpu = self._dp if shared else new_subgroup(same_place, rank.cpu_group)
        self.pp_cpu = (
            self.pp if shared else new_subgroup(same_tokens[:, self.part].tolist(), rank.cpu_group)
        )
        self._replica_cpu = self.mp
        if not shared or self.context > 1:
            self._replica_cpu = new_subgroup(replica.flatten().tolist(), rank.cpu_group)
        self.mesh = one_axis(self.tp, device, "tensor") if self.tensor > 1 else None
        self._expert_groups(rank, ranks, device)

    def _expert_groups(self, rank: Rank, ranks: torch.Tensor, device: torch.device) -> None:
        """Make the groups of experts where they are not spread over the ranks that share a
        stage's other layers.
        """
        self.ep = self.tp
        self.edp = self.held_by
        self._linked_cpu = self._replica_cpu
        self.expert_mesh = self.mesh
        if self.experts == self.tensor:
            return
        same_stage = ranks[:, self.stage].flatten()
        self.ep = new_subgroup(
            same_stage.view(-1, self.experts)[self._experts_row].tolist(), rank.group
        )
        """Group of the ranks that share a layer's experts."""
        self.edp = new_subgroup(same_stage[self.of_experts :: self.experts].tolist(), rank.group)
        """Group of the ranks that have the same experts."""
        if self.linked > 1:
            linked = ranks.view(-1, self.linked * self.ranks)[self.replica // self.linked]
            self._linked_cpu = new_subgroup(linked.tolist(), rank.cpu_group)
        self.expert_mesh = one_axis(self.ep, device, "experts") if self.experts > 1 else None
