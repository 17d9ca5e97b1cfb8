"""Options of the backend megatron, and the libraries of fused operators in its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from siirl_dask.config.checks import at_least
from siirl_dask.devices.operators import MINDSPEED, OPERATORS, TORCH, check_backend_operators
from siirl_dask.errors import ConfigError

MEGATRON_OPERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**OPERATORS, **dict.fromkeys(("rotary", "rms_norm", "swiglu"), (TORCH, MINDSPEED))}
)
"""Libraries that have each operator in megatron-core's layers: its own functions, which are
torch's, or MindSpeed's."""


def check_megatron_operators(given: Mapping[str, str], *, megatron: bool) -> None:
    """Check ``trainer.operators`` for the backend ``megatron``, or for another one. ConfigError for
    libraries that do not go together with it.
    """
    if megatron:
        check_backend_operators(given, MEGATRON_OPERATORS, "megatron")
    for operator, library in given.items():
        if library == MINDSPEED and not megatron:
            raise ConfigError(
                f"trainer.operators.{operator}={MINDSPEED}: MindSpeed replaces functions of "
                "megatron-core; take trainer.backend=megatron, or leave it out"
            )
    if MINDSPEED in given.values() and given.get("rms_norm") != MINDSPEED:
        raise ConfigError(
            f"trainer.operators={dict(given)}: MindSpeed replaces megatron-core's norms wherever "
            f"it is imported; add rms_norm: {MINDSPEED}, or take no operator of it"
        )


@dataclass(kw_only=True, slots=True)
class MegatronConfig:
    """``trainer.megatron``: options of the backend megatron."""

    tensor_parallel: int = 1
    """Ranks that share each layer, and the vocabulary; a divisor of the model's key heads. Times
    ``pipeline_parallel`` and ``context_parallel`` it makes the ranks of a replica of the model, a
    divisor of the role's."""
    pipeline_parallel: int = 1
    """Stages, each with as many layers, through which micro-batches pass one after the other
    (1F1B); a divisor of the model's layers."""
    virtual_pipeline: int = 1
    """Runs of layers that each stage has, first one of every stage, then the next: micro-batches
    pass through all stages that often (interleaved 1F1B). Times ``pipeline_parallel`` a divisor of
    the model's layers."""
    context_parallel: int = 1
    """Ranks that hold the same part of the model and have an equal part of each micro-batch's
    tokens each, of every row's; a divisor of the heads that each has of ``tensor_parallel``."""
    expert_parallel: int | None = None
    """Ranks over which the experts of a mixture's layer are spread, neighbours among those of its
    stage in all replicas; a divisor of the experts, and a divisor or a multiple of
    ``tensor_parallel`` times ``context_parallel``.
    None: as many as ``tensor_parallel``."""

    sequence_parallel: bool = False
    """Let each of the ``tensor_parallel`` ranks of a stage have a part of the tokens between
    attention and MLP, not all of them: norms and what layers hand on take less memory, for more
    bytes sent."""
    distributed_optimizer: bool = False
    """Let each replica hold the optimizer's state of a part of the parameters, step these, and give
    them to the others (ZeRO, arXiv:1910.02054, stage 1)."""

    def __post_init__(self) -> None:
        sizes = {
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
        }
        sizes |= {
            "context_parallel": self.context_parallel,
            "virtual_pipeline": self.virtual_pipeline,
        }
        at_least("trainer.megatron", 1, **sizes)
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"trainer.megatron.virtual_pipeline={self.virtual_pipeline} with "
                "trainer.megatron.pipeline_parallel=1: there are no stages to pass through more "
                "than once; leave it out, or give pipeline_parallel more"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "trainer.megatron.sequence_parallel=true with trainer.megatron.tensor_parallel=1: "
                "there are no ranks "
                "to share a layer's tokens; leave it out, or give tensor_parallel more"
            )
        if self.expert_parallel is None:
            return
        at_least("trainer.megatron", 1, expert_parallel=self.expert_parallel)
        of_stage = self.tensor_parallel * self.context_parallel
        if self.expert_parallel % of_stage and of_stage % self.expert_parallel:
            context = ""
            if self.context_parallel > 1:
                context = f" times context_parallel={self.context_parallel}"
            raise ConfigError(
                f"trainer.megatron.expert_parallel={self.expert_parallel}: expected a divisor or a "
                f"multiple of trainer.megatron.tensor_parallel={self.tensor_parallel}{context}"
            )

    @property
    def ranks(self) -> int:
        """Ranks of a replica of the model."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def shards(self) -> int:
        """Ranks of a replica over which its parameters are divided."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def experts_over(self) -> int:
        """Ranks that share the experts of a layer."""
        if self.expert_parallel is None:
            return self.tensor_parallel
        return self.expert_parallel

    @property
    def linked_replicas(self) -> int:
        """Neighbouring replicas that run their micro-batches together, because their ranks share
        experts.
        """
        return max(1, self.experts_over // (self.tensor_parallel * self.context_parallel))

    @property
    def needs_megatron(self) -> list[str]:
        """Options in use, as ``trainer.megatron.tensor_parallel=2``."""
        options = {
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "context_parallel": self.context_parallel,
            "expert_parallel": self.expert_parallel or 1,
        }
        given = [f"trainer.megatron.{name}={value}" for name, value in options.items() if value > 1]
        return given + ["trainer.megatron.distributed_optimizer=true"] * self.distributed_optimizer
